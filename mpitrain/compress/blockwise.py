"""Vectors as blocks of elements, each with a scale."""

import numpy as np

from collectives.codec import Bytes
from mpitrain.arrays import Array


def number(n: int, block: int) -> int:
    """Number of blocks of n elements; ``block`` 0 is one block of all."""
    return -(-n // (block or n)) if n else 0


def split(x: Array, block: int) -> Array:
    """Blocks of ``x`` as rows, the last one filled up with zeros; not to be written to."""
    n, count = len(x), number(len(x), block)
    width = min(n, block or n)
    if count * width == n:
        return x.reshape(count, width)
    rows = np.zeros((count, width), x.dtype)
    rows.reshape(-1)[:n] = x
    return rows


def join(rows: Array, x: Array) -> None:
    """Write rows of blocks into ``x``, without what filled up the last."""
    x[...] = rows.reshape(-1)[: len(x)]


def lengths(n: int, block: int) -> Array:
    count = number(n, block)
    found = np.full(count, min(n, block or n))
    if count:
        found[-1] = n - (count - 1) * found[0]
    return found


def normalised(rows: Array) -> tuple[Array, Array]:
    """Largest size of each row, float64, shape (rows, 1), and the rows over it: numbers to 1."""
    most = np.abs(rows).max(1, initial=0, keepdims=True).astype(np.float64)
    return most, rows / np.where(most > 0, most, 1)


def single(values: Array) -> Array:
    """Numbers at least 0 as float32, bounded by its largest number."""
    return np.minimum(values, np.finfo(np.float32).max).astype(np.float32)


def covering(values: Array) -> Array:
    """Smallest float32 numbers that are not below ``values``, bounded by the largest number."""
    scales = single(values)
    up = np.nextafter(scales, np.float32(np.finfo(np.float32).max))
    return np.where(scales < values, up, scales)


def times(most: Array, factors: Array) -> Array:
    """Product in float64; infinite where it overflows."""
    with np.errstate(over="ignore"):
        found: Array = most * factors
    return found


def limit(most: float) -> Array:
    """Largest scale of which ``most`` times is still a float32; shape (1,)."""
    largest = np.array([np.finfo(np.float32).max / most], np.float32)
    return np.nextafter(largest, np.float32(0))


def ratios(rows: Array, scales: Array, most: float) -> Array:
    """Rows in units of their scales, from -most to most; 0 where the scale is 0."""
    units = np.where(scales > 0, scales, 1).astype(rows.dtype)
    with np.errstate(over="ignore"):
        found = rows / units[:, None]
    return np.clip(found, -most, most, out=found)


def write_scales(code: Bytes, scales: Array) -> Bytes:
    """Writes scales to the head of a code; returns its rest."""
    head = 4 * scales.size
    code[:head].view(np.float32)[...] = scales.reshape(-1)
    return code[head:]


def read_scales(code: Bytes, count: int) -> tuple[Array, Bytes]:
    """``count`` scales, as float32, and the rest of the code."""
    return code[: 4 * count].view(np.float32), code[4 * count :]
