"""How many bytes published tables count: closed formulas of encoded sizes.

A table's ratio is of what one rank encodes, not of what travels: a dense all-reduce sends
2 (p-1)/p of it, a gathered one p - 1 times as much.
"""

from collections.abc import Sequence
from math import prod

Shape = tuple[int, ...]


def dense_bytes(shapes: Sequence[Shape]) -> int:
    """float32."""
    return 4 * sum(map(prod, shapes))


def sign_bytes(shapes: Sequence[Shape]) -> float:
    """A bit a number (Signum)."""
    return sum(map(prod, shapes)) / 8


def powersgd_bytes(shapes: Sequence[Shape], rank: int) -> int:
    """rank (rows + columns) numbers of each matrix, and vectors as they are."""
    matrices = [shape for shape in shapes if len(shape) > 1]
    vectors = sum(prod(shape) for shape in shapes if len(shape) < 2)
    return 4 * (rank * sum(shape[0] + prod(shape[1:]) for shape in matrices) + vectors)


def dgc_bytes(shapes: Sequence[Shape], keep: float) -> float:
    """Of that share of each matrix 6 bytes, a value and a run length, and vectors as they are."""
    matrices = sum(prod(shape) for shape in shapes if len(shape) > 1)
    vectors = sum(prod(shape) for shape in shapes if len(shape) < 2)
    return 6 * keep * matrices + 4 * vectors


def sent_dense(nbytes: float, ranks: int) -> float:
    """By one rank, in an all-reduce of the least volume, of codes that add up; or in two phases."""
    return 2 * (ranks - 1) / ranks * nbytes


def sent_gathered(nbytes: float, ranks: int) -> float:
    """By one rank, where all codes go to all."""
    return (ranks - 1) * nbytes
