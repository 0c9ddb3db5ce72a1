"""Readers of data, profiles and manifests: what they read, and how they say what they cannot."""

import gzip
import os
import struct

import numpy as np
import pytest

from mpitrain import data
from mpitrain.config import Data
from mpitrain.data.arrays import load_arrays
from mpitrain.data.dataset import Dataset, Samples
from mpitrain.data.idx import load_idx, parse_idx, read_idx
from mpitrain.data.own import OwnSamples
from mpitrain.data.text import Tokens, load_text
from mpitrain.data.tokens import load_tokens
from mpitrain.pipeline.profiles import ProfileError, parse_profile, read_profile, write_profile
from tests.fuzz import fuzz, seeds


def idx_bytes(array):
    kind = {"u1": 8, "i1": 9, "i2": 0xB, "i4": 0xC, "f4": 0xD, "f8": 0xE}[array.dtype.str[1:]]
    head = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_round_trip(tmp_path, dtype, zipped):
    array = (10 * np.random.default_rng(0).normal(size=(3, 4, 5))).astype(dtype)
    content = idx_bytes(array)
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(content) if zipped else content)
    found = read_idx(path)
    assert found.dtype.kind == array.dtype.kind
    np.testing.assert_array_equal(found, array)


GOOD = idx_bytes(np.arange(6, dtype="u1").reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG", "begins with 89504e47"),
        (b"\0\0\x07\x01", "is not an IDX file"),
        (GOOD[:9], "ends within its 2 sizes, at byte 9"),
        (GOOD[:-1], "has 17 bytes; 18 are needed for (2, 3)"),
        (GOOD + b"x", "has 19 bytes; 18 are needed"),
        (b"\0\0\x0e\x03" + b"\xff" * 12, "are needed for (4294967295, 4294967295, 4294967295)"),
        (gzip.compress(GOOD, mtime=0)[:-9], "cannot be unzipped"),
        (b"\x1f\x8bnonsense", "cannot be unzipped"),
    ],
)
def test_idx_files_that_lie(content, message):
    with pytest.raises(data.DataError) as caught:
        parse_idx(content, "images")
    assert message in str(caught.value)
    assert str(caught.value).startswith("images ")


def test_mnists_files(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("t10k", 3)):
        images = rng.integers(0, 256, (count, 28, 28)).astype("u1")
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        labels = np.arange(count, dtype="u1")
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    found = data.load(Data("idx", path=str(tmp_path)), np.float32)
    assert (len(found.train), len(found.test), found.classes) == (6, 3, 6)
    assert found.input_shape == (28, 28, 1)
    assert found.train.inputs.dtype == np.float32 and found.train.inputs.max() <= 1
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(2, dtype="u1")))
    with pytest.raises(data.DataError, match=r"t10k images have shape \(3, 28, 28\)"):
        load_idx(tmp_path, np.float32)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(data.DataError, match="has neither t10k-labels-idx1-ubyte nor"):
        load_idx(tmp_path, np.float32)


def test_arrays_of_a_file_and_of_a_folder(tmp_path):
    inputs, labels = np.arange(20.0).reshape(10, 2), np.arange(10) % 3
    np.savez(tmp_path / "all.npz", inputs=inputs, labels=labels)
    found = load_arrays(tmp_path / "all.npz", 0.2, np.float32)
    assert (len(found.train), len(found.test), found.classes) == (8, 2, 3)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, array in (("inputs", inputs), ("labels", labels)):
        np.save(folder / f"{name}.npy", array)
        np.save(folder / f"test_{name}.npy", array[:3])
    found = load_arrays(folder, 0.2, np.float64)
    assert (len(found.train), len(found.test)) == (10, 3)
    assert isinstance(found.train.inputs, np.memmap)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"inputs": np.zeros((3, 2))}, "has no array 'labels'; its arrays: inputs"),
        ({"inputs": np.zeros((3, 2)), "labels": np.zeros(2, int)}, "do not belong together"),
        ({"inputs": np.zeros((3, 2)), "labels": np.array(["a"] * 3)}, "labels must be numbers"),
        ({"inputs": np.array(["a"] * 3), "labels": np.zeros(3, int)}, "inputs must be numbers"),
        ({"inputs": np.array([{}] * 3), "labels": np.zeros(3, int)}, "has Python objects"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, message):
    np.savez(tmp_path / "all.npz", **arrays)
    with pytest.raises(data.DataError, match=message):
        load_arrays(tmp_path / "all.npz", 0.5, np.float32)


def test_arrays_that_are_not_there(tmp_path):
    (tmp_path / "junk.npz").write_text("junk")
    for name, message in (
        ("none.npz", "cannot be read: No such file or directory"),
        ("", "has no array 'inputs': no file inputs.npy"),
        ("junk.npz", "it is not in numpy's format"),
    ):
        with pytest.raises(data.DataError, match=message):
            load_arrays(tmp_path / name, 0.5, np.float32)


def test_labels_that_are_numbers(tmp_path):
    labels = np.linspace(0, 1, 12).reshape(6, 2)
    np.savez(tmp_path / "all.npz", inputs=np.zeros((6, 3)), labels=labels)
    found = load_arrays(tmp_path / "all.npz", 0.5, np.float32)
    assert (found.classes, found.outputs, found.label_shape) == (0, 2, (2,))
    assert found.label_dtype == np.float32
    np.testing.assert_array_equal(found.train.labels, labels[:3].astype(np.float32))


def test_an_epoch_of_text_predicts_every_token_once():
    tokens = Tokens(np.arange(101, dtype=np.uint16), 10)
    assert len(tokens) == 10
    everything = tokens[np.arange(10)]
    np.testing.assert_array_equal(everything.inputs.ravel(), np.arange(100))
    np.testing.assert_array_equal(everything.labels.ravel(), np.arange(1, 101))
    some = tokens[np.array([7, 2])]
    assert some.inputs[:, 0].tolist() == [70, 20]
    assert len(tokens[:0]) == 0 and tokens[:0].inputs.shape == (0, 10)
    assert everything.labels.dtype == np.int64


def test_text_as_characters_and_as_bytes(tmp_path):
    path = tmp_path / "text"
    path.write_text("äöü abc äöü abc" * 20, encoding="utf-8")
    found = load_text(path, "characters", 5, 0.2)
    assert found.classes == 7
    assert found.input_shape == (5,)
    assert found.labels_per_sample == 5
    assert load_text(path, "bytes", 5, 0.2).classes == 256
    path.write_bytes(b"abc\xff")
    with pytest.raises(data.DataError, match="is not UTF-8 at byte 3"):
        load_text(path, "characters", 1, 0.5)
    path.write_text("too short")
    with pytest.raises(data.DataError, match="has 9 tokens: too few"):
        load_text(path, "characters", 50, 0.2)
    with pytest.raises(data.DataError, match="cannot be read: No such file"):
        load_text(tmp_path / "none", "bytes", 5, 0.2)


def test_token_files_are_mapped_and_checked(tmp_path):
    for name, count in (("train", 100), ("val", 30)):
        np.arange(count, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    found = load_tokens(tmp_path, 9)
    assert found.classes == 100
    assert isinstance(found.train.tokens, np.memmap)
    assert load_tokens(tmp_path, 9, 500).classes == 500
    with pytest.raises(data.DataError, match=r"has token 99, and data.vocabulary is 50"):
        load_tokens(tmp_path, 9, 50)
    with pytest.raises(data.DataError, match=r"val\.bin has 30 tokens, too few"):
        load_tokens(tmp_path, 40)
    (tmp_path / "train.bin").write_bytes(b"odd")
    with pytest.raises(data.DataError, match="has 3 bytes, which is no whole number"):
        load_tokens(tmp_path, 9)


def test_profiles_round_trip(tmp_path):
    _, (text, _), _ = seeds()["profile"]
    found = parse_profile(text, "p")
    assert [layer.forward_s for layer in found] == [0.0, 0.0015]
    assert found[1].parameter_bytes == 128
    write_profile(tmp_path / "p.json", found)
    assert read_profile(tmp_path / "p.json") == found


def node(name, seconds, activation):
    return (
        f"{name} -- {name.upper()} -- forward_compute_time={seconds}, backward_compute_time=0.0, "
        f"activation_size={activation}, parameter_size=1.0\n"
    )


def test_branches_between_two_layers_are_one_layer():
    text = "".join(node(n, s, a) for n, s, a in zip("abcde", (1, 2, 3, 4, 5), (10, 20, 30, 40, 50)))
    text += "".join(f"\t{a} -- {b}\n" for a, b in ("ab", "ac", "bd", "cd", "de"))
    found = parse_profile(text.encode(), "p")
    assert [round(1e3 * layer.forward_s) for layer in found] == [1, 9, 5]
    assert [layer.activation_bytes for layer in found] == [10, 40, 50]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no layers"),
        ("what\n", "line 1: neither a layer nor an edge: 'what'"),
        (node("a", 1, 1) + "\ta -- b\n", "an edge leads to b, which is no layer"),
        (node("a", 1, 1) + node("b", 1, 1) + "\ta -- b\n\tb -- a\n", "in a circle"),
        (node("a", "1-1", 1), "line 1: could not convert"),
        ("[1]", "Expected `object`"),
    ],
)
def test_profiles_that_are_none(text, message):
    with pytest.raises(ProfileError, match=message):
        parse_profile(text.encode(), "p")


def arrays(folder, inputs, labels):
    folder.mkdir()
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return folder


@pytest.mark.parametrize("most", [1 << 26, 1 << 10])
def test_a_digest_is_of_samples_classes_and_numbers(tmp_path, monkeypatch, most):
    """All are read, or some; in several parts."""
    count = 3000
    monkeypatch.setattr("mpitrain.data.digests._ALL", most)
    monkeypatch.setattr("mpitrain.data.digests._AT_ONCE", 1000)
    rng = np.random.default_rng(0)
    inputs, labels = rng.random((count, 5)), rng.integers(0, 3, count)
    first = load_arrays(arrays(tmp_path / "first", inputs, labels), 0.2, np.float64)
    again = load_arrays(tmp_path / "first", 0.2, np.float32)
    assert data.digest(first) == data.digest(again)  # run.dtype is not the data's
    known = {data.digest(first)}
    for name, change in {
        "first": lambda x, y: x.__setitem__((0, 0), 5.0),
        "last": lambda x, y: x.__setitem__((-1, -1), 5.0),
        "labels": lambda x, y: y.__setitem__(0, (y[0] + 1) % 3),
        "classes": lambda x, y: y.__setitem__(0, 3),
        "order": lambda x, y: x.__setitem__(slice(None), x[::-1].copy()),
    }.items():
        x, y = inputs.copy(), labels.copy()
        change(x, y)
        changed = load_arrays(arrays(tmp_path / f"{name}-changed", x, y), 0.2, np.float32)
        known.add(data.digest(changed))
    shorter = load_arrays(arrays(tmp_path / "shorter", inputs[:-5], labels[:-5]), 0.2, np.float32)
    known.add(data.digest(shorter))
    assert len(known) == 7
    inputs[1] = 5.0
    second = load_arrays(arrays(tmp_path / "second", inputs, labels), 0.2, np.float32)
    assert (data.digest(second) in known) == (most < count)


def test_bfloat16_becomes_the_type_of_the_job():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    values = np.array([[0.1], [0.35]], ml_dtypes.bfloat16)
    samples = OwnSamples([(value, value) for value in values], np.float32)
    assert samples[:2].inputs.dtype == samples[:2].labels.dtype == np.float32
    known = {
        data.digest(Dataset(Samples(x, x), None, 0)) for x in (values, values[::-1], 0 * values)
    }
    assert len(known) == 3


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_digits_of_which_a_part_has_too_few(fraction):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    with pytest.raises(data.DataError, match=rf"data\.test_fraction = {fraction} of 1797 digits"):
        data.load(Data(test_fraction=fraction), np.float32)


def test_a_digest_reads_little_of_much(tmp_path, monkeypatch):
    """Of 300 MB, a thousandth."""
    np.memmap(tmp_path / "train.bin", "<u2", mode="w+", shape=(150_000_000,))
    np.memmap(tmp_path / "val.bin", "<u2", mode="w+", shape=(1000,))
    tokens = load_text(tmp_path / "train.bin", "bytes", 100, 0.2)
    kind, taken = type(tokens.train), []
    read = kind.__getitem__

    def counted(samples, which):
        taken.append(len(which) if isinstance(which, np.ndarray) else 1)
        return read(samples, which)

    monkeypatch.setattr(kind, "__getitem__", counted)
    first = data.digest(tokens)
    assert len(tokens.train) > 1_000_000 and taken == [1, 1024] * 2
    with (tmp_path / "train.bin").open("r+b") as file:
        file.write(b"x")
    assert data.digest(load_text(tmp_path / "train.bin", "bytes", 100, 0.2)) != first


def test_a_device_or_a_fifo_is_no_data(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "FIFO"), ("/dev/zero", "device")):
        for name in ("text", "arrays"):
            with pytest.raises(data.DataError, match=f"it is a {kind}, not an ordinary file"):
                data.load(Data(name, path=str(path)), np.float32)


@pytest.mark.parametrize("name", seeds())
def test_nothing_that_is_read_ends_in_a_crash(name):
    outcomes = fuzz(name, 1000)
    assert outcomes["read"] > 30
    assert outcomes.total() - outcomes["read"] > 30
