"""Arrays in an ``.npz`` file, or in a folder of ``.npy`` files, which are mapped."""

import lzma
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import DTypeLike

from mpitrain.arrays import Array
from mpitrain.data.dataset import DataError, Dataset, Samples, alike

#: Errors of numpy and zipfile for files that are cut, changed, or larger than memory.
_UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, EOFError, SyntaxError, RuntimeError, MemoryError,
    OverflowError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
    tokenize.TokenError,
)  # fmt: skip


def load_arrays(
    path: Path, test_fraction: float, dtype: DTypeLike, ignored: int | None = None
) -> Dataset:
    """``inputs`` (N, ...) and ``labels`` (N,) or (N, ...) of a file or a folder.

    Integer labels are classes from 0 on, or ``ignored`` and do not count; labels and inputs of
    floating point become ``dtype``.
    Tests use ``test_inputs`` and ``test_labels`` if they exist, else the last part of the samples.
    A folder's arrays are read when they are needed, or at once if their type changes.

    Raises:
        DataError: an array is missing or does not fit; nothing is unpickled.
    """
    arrays = {name: _read(path, name) for name in ("inputs", "labels")}
    tests = {name: _read(path, f"test_{name}", optional=True) for name in ("inputs", "labels")}
    train = _samples(str(path), arrays["inputs"], arrays["labels"], dtype)
    if tests["inputs"] is None and tests["labels"] is None:
        middle = len(train) - max(1, int(len(train) * test_fraction))
        train, test = train[:middle], train[middle:]
    else:
        test = _samples(f"{path} (test)", tests["inputs"], tests["labels"], dtype)
    return alike(path, train, test, ignored=ignored)


def _read(path: Path, name: str, *, optional: bool = False) -> Array | None:
    try:
        if path.is_dir():
            found: Array = np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            return found
        # Mapped, so that a single array, which is refused, is not read first.
        file = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(file, NpzFile):
            raise DataError(f"{path} is one array; an .npz file or a folder of .npy is needed")
        with file:
            if name not in file.files:
                if optional:
                    return None
                there = ", ".join(file.files) or "none"
                raise DataError(f"{path} has no array {name!r}; its arrays: {there}")
            member: Array = file[name]
        if not isinstance(member, np.ndarray):
            raise DataError(f"{path}: {name!r} is not an array in numpy's format")
        return member
    except DataError:
        raise
    except FileNotFoundError as error:
        if optional and path.exists():
            return None
        if path.exists():
            raise DataError(f"{path} has no array {name!r}: no file {name}.npy") from error
        raise DataError(f"data.path = {str(path)!r} cannot be read: {error.strerror}") from error
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if "allow_pickle" in reason:  # as numpy says of any file that is not its own
            reason = "it is not in numpy's format, or has Python objects"
        raise DataError(f"{path}: the array {name!r} cannot be read: {reason}") from error


def _samples(name: str, inputs: Array | None, labels: Array | None, dtype: DTypeLike) -> Samples:
    shapes = [None if a is None else a.shape for a in (inputs, labels)]
    if inputs is None or labels is None or not all(shapes) or len(inputs) != len(labels):
        raise DataError(f"{name}: inputs and labels of shapes {shapes} do not belong together")
    if labels.dtype.kind not in "iuf":
        raise DataError(f"{name}: labels must be numbers, not {labels.dtype}")
    if labels.dtype.kind == "f":
        labels = _as(labels, dtype)
    if inputs.dtype.kind == "f":
        inputs = _as(inputs, dtype)
    elif inputs.dtype.kind not in "iu":
        raise DataError(f"{name}: inputs must be numbers, not {inputs.dtype}")
    return Samples(inputs, labels)


def _as(values: Array, dtype: DTypeLike) -> Array:
    with np.errstate(over="ignore"):  # an infinite number leads to an error on the loss
        return values.astype(dtype, copy=False)
