"""MNIST's files (LeCun): big-endian sizes, then the numbers; gzipped or not."""

import gzip
import io
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Shape
from mpitrain.data.dataset import Dataset, Samples
from mpitrain.data.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
#: Four bytes, then at most 255 sizes of four.
_LONGEST_HEADER = 4 + 4 * 255
#: A byte of deflate becomes no more than this (zlib's technical details), nor does gzip's frame.
_MOST_PER_BYTE = 1032
#: NumPy counts the bytes of an array in this many, even where a size is 0.
_MOST_BYTES = 2**63 - 1


def load_idx(folder: Path, dtype: DTypeLike) -> Dataset:
    """MNIST, or what has its files: images in 0..1 as (N, H, W, 1), labels from 0.

    Raises:
        DataError: a file is missing, or is not what it should be.
    """
    parts = []
    for part in ("train", "t10k"):
        images = read_idx(_find(folder, f"{part}-images-idx3-ubyte"))
        labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"))
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise DataError(
                f"{folder}: the {part} images have shape {images.shape} and the labels "
                f"{labels.shape}; (N, rows, columns) and (N,) are needed"
            )
        if images.dtype != np.uint8 or labels.dtype != np.uint8:
            raise DataError(
                f"{folder}: the {part} images are {images.dtype} and the labels {labels.dtype}; "
                "both must be uint8"
            )
        inputs = (images[..., None] / 255.0).astype(dtype)
        parts.append(Samples(inputs, labels.astype(np.int64)))
    train, test = parts
    if not len(train) or not len(test):
        raise DataError(f"{folder}: there are no samples to train and to test on")
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise DataError(
            f"{folder}: the train images are {train.inputs.shape[1:3]} points and the t10k images "
            f"{test.inputs.shape[1:3]}; they must be the same"
        )
    return Dataset(train, test, int(max(train.labels.max(), test.labels.max())) + 1)


def read_idx(path: Path) -> Array:
    """The array of an IDX file; ``DataError`` if it is not one."""
    try:
        return parse_idx(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def parse_idx(data: bytes, name: str) -> Array:
    """The array of an IDX file's bytes; no memory is taken for what they cannot hold.

    Raises:
        DataError: naming the file, what was expected and what came.
    """
    zipped = data[:2] == b"\x1f\x8b"
    start, shape, kind = _header(
        _unzipped(data, _LONGEST_HEADER, name) if zipped else data[:_LONGEST_HEADER], name
    )
    expected = start + prod(shape) * kind.itemsize
    if zipped:
        if expected > _MOST_PER_BYTE * len(data):
            raise DataError(
                f"{name} has {len(data)} zipped bytes, which cannot be the {expected} that are "
                f"needed for {shape} {kind}"
            )
        # One more than is needed: enough to see that there are too many, and to reach the checksum.
        data = _unzipped(data, expected + 1, name)
    if len(data) != expected:
        found = f"more than {expected}" if zipped and len(data) > expected else len(data)
        raise DataError(f"{name} has {found} bytes; {expected} are needed for {shape} {kind}")
    return np.frombuffer(data, kind, offset=start).reshape(shape)


def _header(head: bytes, name: str) -> tuple[int, Shape, np.dtype]:
    """Where the numbers start, the shape, and their type."""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES:
        raise DataError(f"{name} is not an IDX file: it begins with {head[:4].hex() or 'nothing'}")
    kind, axes = np.dtype(_TYPES[head[2]]), head[3]
    start = 4 + 4 * axes
    if len(head) < start:
        raise DataError(f"{name} ends within its {axes} sizes, at byte {len(head)}")
    if axes > 32:
        raise DataError(f"{name} has {axes} axes; 32 are the most")
    shape = struct.unpack(f">{axes}I", head[4:start])
    if 0 in shape and prod(size or 1 for size in shape) * kind.itemsize > _MOST_BYTES:
        raise DataError(f"{name} is empty, but its sizes {shape} are too large for an array")
    return start, shape, kind


def _unzipped(data: bytes, most: int, name: str) -> bytes:
    """The first ``most`` bytes, or all if there are fewer."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(most)
    except EOFError as error:
        raise DataError(f"{name} is cut off: its {len(data)} zipped bytes have no end") from error
    except (OSError, zlib.error) as error:
        raise DataError(f"{name} cannot be unzipped: {error}") from error


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(f"{folder} has neither {name} nor {name}.gz")
