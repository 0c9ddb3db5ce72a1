"""Readers of data at the edges: files that promise more than they hold, and parts that differ."""

import gzip
import io
import json
import struct
import zipfile

import numpy as np
import pytest

from mpitrain.data import DataError
from mpitrain.data.arrays import load_arrays
from mpitrain.data.idx import load_idx, parse_idx
from mpitrain.data.text import Tokens, load_text
from mpitrain.data.tokens import load_tokens

MAX = 2**32 - 1


def idx(kind, *shape, content=b""):
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def zipped(content):
    # No time in it: the names of the tests are the same in every process.
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(8, 0, MAX, MAX, MAX), "array is too big"),
        (idx(8, *[1] * 65, content=b"x"), "maximum"),
        (zipped(idx(8, 2, content=b"abc")), "has 11 bytes; 10 are needed"),
        (zipped(idx(8, 2, content=b"ab")) + b"junk", "cannot be unzipped"),
        (zipped(idx(8, 2, content=b"ab"))[:-8] + bytes(8), "cannot be unzipped: CRC"),
        (zipped(idx(14, MAX, MAX)), "are needed for"),
    ],
)
def test_idx_files_that_cannot_be(content, message):
    with pytest.raises(DataError, match=message) as caught:
        parse_idx(content, "images")
    assert str(caught.value).startswith("images ")


def test_idx_of_no_samples_of_no_axes_and_of_two_gzip_members():
    assert parse_idx(idx(8, 0, 28, 28), "f").shape == (0, 28, 28)
    assert parse_idx(idx(8, content=b"\7"), "f") == 7
    whole = idx(8, 3, content=b"abc")
    assert parse_idx(zipped(whole[:5]) + zipped(whole[5:]), "f").tobytes() == b"abc"


def mnist(folder, *, images="u1", labels="u1", side=4):
    """MNIST's files; of the train part with other types, or the test part of another size."""
    kinds = {"u1": 8, "i1": 9, "f4": 13}
    for part, kind, label, size in (("train", images, labels, 4), ("t10k", "u1", "u1", side)):
        points = np.zeros((2, size, size), f">{kind}").tobytes()
        content = idx(kinds[kind], 2, size, size, content=points)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(content)
        content = idx(kinds[label], 2, content=np.zeros(2, f">{label}").tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(content)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": "i1"}, "the labels int8; both must be uint8"),
        ({"labels": "f4"}, "must be uint8"),
        ({"images": "f4"}, "the train images are >f4 and"),
        ({"side": 5}, r"train images are \(4, 4\) points and the t10k images \(5, 5\)"),
    ],
)
def test_mnists_files_of_other_types_and_sizes(tmp_path, changed, message):
    mnist(tmp_path)
    assert load_idx(tmp_path, np.float32).classes == 1
    mnist(tmp_path, **changed)
    with pytest.raises(DataError, match=message):
        load_idx(tmp_path, np.float32)


X, Y = np.zeros((4, 2)), np.arange(4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": np.array(3)}, "do not belong together"),
        ({"test_labels": Y}, r"\(test\): inputs and labels of shapes \[None, \(4,\)\]"),
        ({"test_inputs": X}, r"\(test\): inputs and labels of shapes \[\(4, 2\), None\]"),
        ({"test_inputs": np.zeros((4, 5)), "test_labels": Y}, "a sample's inputs are"),
        ({"test_inputs": X.astype(int), "test_labels": Y}, "float32 to train and"),
        ({"test_inputs": X, "test_labels": np.zeros((4, 3), int)}, "a sample's labels are"),
        ({"inputs": X[:1], "labels": Y[:1]}, "no samples to train and to test on"),
        ({"labels": np.zeros((4, 0), int)}, "hold none"),
    ],
)
def test_arrays_of_which_parts_differ(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **({"inputs": X, "labels": Y} | arrays))
    with pytest.raises(DataError, match=message):
        load_arrays(tmp_path / "a.npz", 0.25, np.float32)


def test_a_single_array_is_no_data_set(tmp_path):
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(DataError, match=r"is one array; an \.npz file or a folder"):
        load_arrays(tmp_path / "a.npy", 0.25, np.float32)


def header(count):
    file = io.BytesIO()
    head = {"descr": "<f8", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, head)
    return file.getvalue()


@pytest.mark.parametrize("count", [100, 10**15, 10**30, -1])
def test_arrays_that_promise_more_than_the_file_holds(tmp_path, count):
    np.save(tmp_path / "labels.npy", Y)
    (tmp_path / "inputs.npy").write_bytes(header(count))
    with pytest.raises(DataError, match=r"the array 'inputs' cannot be read: ."):
        load_arrays(tmp_path, 0.25, np.float32)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("inputs.npy", header(count))
    with pytest.raises(DataError, match=r"the array 'inputs' cannot be read: ."):
        load_arrays(tmp_path / "a.npz", 0.25, np.float32)


@pytest.mark.parametrize("units", ["bytes", "characters"])
@pytest.mark.parametrize(("text", "fraction"), [("", 0.2), ("a", 0.5), ("abcdef" * 10, 0.001)])
def test_text_without_a_sample_of_each(tmp_path, units, text, fraction):
    (tmp_path / "text").write_text(text)
    with pytest.raises(DataError, match=f"has {len(text)} tokens: too few"):
        load_text(tmp_path / "text", units, 4, fraction)


def test_text_of_bytes_is_mapped(tmp_path):
    (tmp_path / "text").write_text("äbc" * 9, encoding="utf-8")
    found = load_text(tmp_path / "text", "bytes", 4, 0.3)
    assert isinstance(found.train.tokens, np.memmap)
    assert found.train[:1].inputs.tolist() == [list("äbc".encode())]


@pytest.mark.parametrize("count", [0, 1, 10])
def test_too_few_tokens_are_no_samples(count):
    assert len(Tokens(np.arange(count), 10)) == 0


def test_only_the_asked_tokens_are_read():
    class Watched(np.ndarray):
        read = 0

        def __getitem__(self, which):
            found = super().__getitem__(which)
            Watched.read += found.size if self.ndim == 1 else 0
            return found

    tokens = Tokens(np.arange(10_001, dtype=np.uint16).view(Watched), 10)
    tokens[np.array([3, 900])]
    assert Watched.read == 2 * 11


@pytest.fixture
def folder(tmp_path):
    for name in ("train", "val"):
        np.arange(30, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


def test_the_vocabulary_is_given_or_in_the_meta_file_or_found(folder):
    (folder / "meta.pkl").write_bytes(b"never unpickled")
    assert load_tokens(folder, 4).classes == 30
    (folder / "meta.json").write_text(json.dumps({"vocab_size": 64, "other": [1]}))
    assert load_tokens(folder, 4).classes == 64
    assert load_tokens(folder, 4, 50).classes == 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "gives no vocabulary"),
        ("{}", "gives no vocabulary: .*vocab_size"),
        ('{"vocab_size": 0}', "gives no vocabulary"),
        ('{"vocab_size": "64"}', "gives no vocabulary"),
        ('{"vocab_size": 9}', "has token 29, and vocab_size of meta.json is 9"),
    ],
)
def test_meta_files_that_do_not_fit(folder, content, message):
    (folder / "meta.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokens(folder, 4)


def test_missing_and_empty_token_files(folder):
    (folder / "val.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"val\.bin is empty"):
        load_tokens(folder, 4)
    (folder / "val.bin").unlink()
    with pytest.raises(DataError, match=r"val\.bin cannot be read: No such file"):
        load_tokens(folder, 4)
