"""MNIST's files, IDX (LeCun): big-endian sizes, then the numbers; gzipped or not."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array
from mpitrain.data.dataset import DataError, Dataset, Samples, alike

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def load_idx(folder: Path, dtype: DTypeLike) -> Dataset:
    """MNIST, or other data in its files: images in 0..1 as (N, H, W, 1), labels from 0.

    Raises:
        DataError: a file is missing, or is wrong.
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
    return alike(folder, *parts)


def read_idx(path: Path) -> Array:
    """Array of an IDX file; ``DataError`` if it is not one."""
    try:
        return parse_idx(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def parse_idx(data: bytes, name: str) -> Array:
    """Array of an IDX file's bytes.

    Raises:
        DataError: the bytes are no such file; the message begins with ``name``.
    """
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{name} cannot be unzipped: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES:
        raise DataError(f"{name} is not an IDX file: it begins with {data[:4].hex() or 'nothing'}")
    kind, axes = np.dtype(_TYPES[data[2]]), data[3]
    start = 4 + 4 * axes
    if len(data) < start:
        raise DataError(f"{name} ends within its {axes} sizes, at byte {len(data)}")
    shape = struct.unpack(f">{axes}I", data[4:start])
    expected = start + prod(shape) * kind.itemsize
    if len(data) != expected:
        raise DataError(f"{name} has {len(data)} bytes; {expected} are needed for {shape} {kind}")
    try:
        return np.frombuffer(data, kind, offset=start).reshape(shape)
    except ValueError as error:  # too many axes, or sizes beside a 0 that are too large
        raise DataError(f"{name} has sizes {shape}: {error}") from error


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(f"{folder} has neither {name} nor {name}.gz")
