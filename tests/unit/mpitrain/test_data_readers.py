"""Readers of data: what they read, and files that promise more than they hold or do not fit."""

import gzip
import io
import json
import struct
import zipfile

import numpy as np
import pytest

from mpitrain.config import Data
from mpitrain.data import DataError, load
from mpitrain.data.arrays import load_arrays
from mpitrain.data.dataset import Dataset, Samples
from mpitrain.data.idx import load_idx, parse_idx, read_idx
from mpitrain.data.text import Tokens
from mpitrain.data.tokens import load_tokens

MAX = 2**32 - 1
KINDS = {"u1": 8, "i1": 9, "i2": 0xB, "i4": 0xC, "f4": 0xD, "f8": 0xE}


def idx(kind, *shape, content=b""):
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def idx_of(array):
    content = array.astype(array.dtype.newbyteorder(">")).tobytes()
    return idx(KINDS[array.dtype.str[1:]], *array.shape, content=content)


def zipped(content):
    # No time in it: the names of the tests are the same in every process.
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("packed", [bytes, zipped])
def test_idx_round_trip(tmp_path, dtype, packed):
    array = (10 * np.random.default_rng(0).normal(size=(3, 4, 5))).astype(dtype)
    (tmp_path / "file").write_bytes(packed(idx_of(array)))
    found = read_idx(tmp_path / "file")
    assert found.dtype.kind == array.dtype.kind
    np.testing.assert_array_equal(found, array)


GOOD = idx(8, 2, 3, content=b"abcdef")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"\0\0\x07\x01", "is not an IDX file"),
        (GOOD[:9], "ends within its 2 sizes, at byte 9"),
        (GOOD[:-1], r"has 17 bytes; 18 are needed for \(2, 3\)"),
        (zipped(GOOD + b"x"), "has 19 bytes; 18 are needed"),
        (zipped(idx(14, MAX, MAX, MAX)), rf"are needed for \({MAX}, {MAX}, {MAX}\)"),
        (idx(8, *[1] * 65, content=b"x"), "maximum"),
        (b"\x1f\x8bnonsense", "cannot be unzipped"),
        (zipped(GOOD) + b"junk", "cannot be unzipped"),
    ],
)
def test_idx_files_that_lie(content, message):
    with pytest.raises(DataError, match=f"^images .*{message}"):
        parse_idx(content, "images")


def mnist(folder, *, images="u1", labels="u1", side=4, count=2):
    """MNIST's files; of the train part with other types, or the test part of another size."""
    for part, kind, label, size in (("train", images, labels, 4), ("t10k", "u1", "u1", side)):
        points = idx_of(np.full((2, size, size), 255 if kind == "u1" else 1, kind))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(zipped(points))
        own = np.arange(count if part == "t10k" else 2).astype(label)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_of(own))


def test_mnists_files(tmp_path):
    mnist(tmp_path)
    found = load(Data("idx", path=str(tmp_path)), np.float32)
    assert (len(found.train), len(found.test), found.classes) == (2, 2, 2)
    assert found.input_shape == (4, 4, 1)
    assert found.train.inputs.dtype == np.float32 and found.train.inputs.max() == 1
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="has neither t10k-labels-idx1-ubyte nor"):
        load_idx(tmp_path, np.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": "i1"}, "the labels int8; both must be uint8"),
        ({"labels": "f4"}, "must be uint8"),
        ({"images": "f4"}, "the train images are >f4 and"),
        ({"side": 5}, r"inputs are \(4, 4, 1\) float32 to train and \(5, 5, 1\)"),
        ({"count": 3}, r"t10k images have shape \(2, 4, 4\)"),
    ],
)
def test_mnists_files_of_other_types_and_sizes(tmp_path, changed, message):
    mnist(tmp_path, **changed)
    with pytest.raises(DataError, match=message):
        load_idx(tmp_path, np.float32)


def test_arrays_of_a_file_and_of_a_folder(tmp_path):
    inputs, labels = np.arange(20.0).reshape(10, 2), np.arange(10) % 3
    np.savez(tmp_path / "all.npz", inputs=inputs, labels=labels)
    found = load_arrays(tmp_path / "all.npz", 0.2, np.float32)
    assert (len(found.train), len(found.test), found.classes) == (8, 2, 3)
    for name, array in (("inputs", inputs), ("labels", labels)):
        np.save(tmp_path / f"{name}.npy", array)
        np.save(tmp_path / f"test_{name}.npy", array[:3])
    found = load_arrays(tmp_path, 0.2, np.float64)
    assert (len(found.train), len(found.test)) == (10, 3)
    assert isinstance(found.train.inputs, np.memmap)


@pytest.mark.parametrize(("ignored", "classes"), [(255, 3), (2, 256), (-100, 256), (None, 256)])
def test_a_label_that_does_not_count_is_no_class(tmp_path, ignored, classes):
    labels = np.array([0, 255, 1, 2, 0, 1, 2, 0, 1, 255], np.uint8)
    np.savez(tmp_path / "all.npz", inputs=np.zeros((10, 2)), labels=labels)
    own = Data("arrays", path=str(tmp_path / "all.npz"))
    assert load(own, np.float32, ignored).classes == classes


X, Y, TEXTS = np.zeros((4, 2)), np.arange(4), np.array(["a"] * 4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": None}, "has no array 'labels'; its arrays: inputs"),
        ({"labels": Y[:3]}, "do not belong together"),
        ({"labels": TEXTS}, "labels must be numbers"),
        ({"inputs": np.array([{}] * 4)}, "has Python objects"),
        ({"test_labels": Y}, r"\(test\): inputs and labels of shapes \[None, \(4,\)\]"),
        ({"test_inputs": np.zeros((4, 5)), "test_labels": Y}, "a sample's inputs are"),
        ({"test_inputs": X.astype(int), "test_labels": Y}, "float32 to train and"),
        ({"inputs": X[:1], "labels": Y[:1]}, "no samples to train and to test on"),
        ({"labels": np.zeros((4, 0), int)}, "hold none"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, message):
    given = {"inputs": X, "labels": Y} | arrays
    np.savez(tmp_path / "a.npz", **{name: one for name, one in given.items() if one is not None})
    with pytest.raises(DataError, match=message):
        load_arrays(tmp_path / "a.npz", 0.25, np.float32)


def test_arrays_that_are_not_there(tmp_path):
    (tmp_path / "junk.npz").write_text("junk")
    np.save(tmp_path / "a.npy", X)
    for name, message in (
        ("none.npz", "cannot be read: No such file or directory"),
        ("", "has no array 'inputs': no file inputs.npy"),
        ("junk.npz", "it is not in numpy's format"),
        ("a.npy", r"is one array; an \.npz file or a folder"),
    ):
        with pytest.raises(DataError, match=message):
            load_arrays(tmp_path / name, 0.5, np.float32)


@pytest.mark.parametrize("count", [100, 10**15, 10**30, -1])
def test_arrays_that_promise_more_than_the_file_holds(tmp_path, count):
    file = io.BytesIO()
    head = {"descr": "<f8", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, head)
    np.save(tmp_path / "labels.npy", Y)
    (tmp_path / "inputs.npy").write_bytes(file.getvalue())
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("inputs.npy", file.getvalue())
    for path in (tmp_path, tmp_path / "a.npz"):
        with pytest.raises(DataError, match=r"the array 'inputs' cannot be read: ."):
            load_arrays(path, 0.25, np.float32)


def test_only_the_asked_tokens_are_read():
    class Watched(np.ndarray):
        read = 0

        def __getitem__(self, which):
            found = super().__getitem__(which)
            Watched.read += found.size if self.ndim == 1 else 0
            return found

    Tokens(np.arange(10_001, dtype=np.uint16).view(Watched), 10)[np.array([3, 900])]
    assert Watched.read == 2 * 11


@pytest.fixture
def folder(tmp_path):
    for name in ("train", "val"):
        np.arange(30, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


def test_the_vocabulary_is_given_or_in_the_meta_file_or_found(folder):
    (folder / "meta.pkl").write_bytes(b"never unpickled")
    found = load_tokens(folder, 4)
    assert found.classes == 30 and isinstance(found.train.tokens, np.memmap)
    (folder / "meta.json").write_text(json.dumps({"vocab_size": 64, "other": [1]}))
    assert load_tokens(folder, 4).classes == 64
    assert load_tokens(folder, 4, 50).classes == 50


def test_token_files_that_do_not_fit(folder):
    with pytest.raises(DataError, match=r"has token 29, and data.vocabulary is 20"):
        load_tokens(folder, 4, 20)
    with pytest.raises(DataError, match=r"train\.bin has 30 tokens, too few"):
        load_tokens(folder, 30)
    for content, message in (
        (b"odd", "has 3 bytes, which is no whole number"),
        (b"", r"val\.bin is empty"),
        (None, r"val\.bin cannot be read: No such file"),
    ):
        (folder / "val.bin").unlink()
        if content is not None:
            (folder / "val.bin").write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_tokens(folder, 4)


def test_samples_are_tokens_where_a_line_of_integers_has_a_line_of_labels():
    rows, words = np.zeros((4, 6), "f4"), np.zeros((4, 6), "i4")
    model = np.zeros(4, [("input_ids", "i8", 7), ("positions", "f4", 7)])
    for inputs, labels, tokens in (
        (words, words, 6),
        (model, words, 7),
        (rows, words, 0),
        (words, words[:, 0], 0),
        (words[:, :, None], words, 0),
    ):
        assert Dataset(Samples(inputs, labels), None, 3).tokens == tokens
    assert Dataset(Samples(words, words), None, 3, varies=True).tokens == 0
