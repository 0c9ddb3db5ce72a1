"""Arrays of one's own: an ``.npz`` file, or a folder of ``.npy`` files that are mapped."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.data.dataset import Dataset, Samples
from mpitrain.data.errors import DataError
from mpitrain.nn import Array


def load_arrays(path: Path, test_fraction: float, dtype: DTypeLike) -> Dataset:
    """``inputs`` (N, ...) and ``labels`` (N,) or (N, ...), integers from 0, of a file or a folder.

    ``test_inputs`` and ``test_labels`` are tested on if they are there, else the last part of the
    samples.  Inputs of floating point become ``dtype``; a folder's are read as they are needed.

    Raises:
        DataError: an array is missing or does not fit; nothing is unpickled.
    """
    arrays = {name: _read(path, name) for name in ("inputs", "labels")}
    tests = {name: _read(path, f"test_{name}", optional=True) for name in ("inputs", "labels")}
    train = _samples(str(path), arrays["inputs"], arrays["labels"], dtype)
    if tests["inputs"] is None:
        middle = len(train) - max(1, int(len(train) * test_fraction))
        train, test = train[:middle], train[middle:]
    else:
        test = _samples(f"{path} (test)", tests["inputs"], tests["labels"], dtype)
    if not len(train) or not len(test):
        raise DataError(f"{path}: there are no samples to train and to test on")
    return Dataset(train, test, int(max(train.labels.max(), test.labels.max())) + 1)


def _read(path: Path, name: str, *, optional: bool = False) -> Array | None:
    try:
        if path.is_dir():
            found: Array = np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            return found
        with np.load(path, allow_pickle=False) as file:
            if not hasattr(file, "files") or name not in file.files:
                raise FileNotFoundError
            member: Array = file[name]
            return member
    except FileNotFoundError as error:
        if optional and path.exists():
            return None
        raise DataError(f"{path} has no array {name!r}") from error
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, SyntaxError) as error:
        raise DataError(f"{path}: the array {name!r} cannot be read: {error}") from error


def _samples(name: str, inputs: Array | None, labels: Array | None, dtype: DTypeLike) -> Samples:
    if inputs is None or labels is None or not inputs.ndim or len(inputs) != len(labels):
        shapes = [None if a is None else a.shape for a in (inputs, labels)]
        raise DataError(f"{name}: inputs and labels of shapes {shapes} do not belong together")
    if labels.dtype.kind not in "iu":
        raise DataError(f"{name}: labels must be integers, not {labels.dtype}")
    if len(labels) and labels.min() < 0:
        raise DataError(f"{name}: labels must be 0 or more, not {labels.min()}")
    if inputs.dtype.kind == "f":
        inputs = inputs.astype(dtype, copy=False)
    elif inputs.dtype.kind not in "iu":
        raise DataError(f"{name}: inputs must be numbers, not {inputs.dtype}")
    return Samples(inputs, labels)
