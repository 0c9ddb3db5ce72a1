"""Vectors of few non-zeros as pairs of index and value, and their sums."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Stream(NamedTuple):
    """A vector as pairs, or, with ``indices`` ``None``, as it is.

    Attributes:
        indices: shape (pairs,), uint32 or uint64, rising.
        values: shape (pairs,), or (length,).
    """

    indices: Array | None
    values: Array


def add(left: Stream, right: Stream) -> Stream:
    """The sum of two vectors; pairs only if both are."""
    if left.indices is not None and right.indices is not None:
        return _merged(left.indices, left.values, right.indices, right.values)
    if left.indices is not None:
        total = right.values.copy()
        total[left.indices] = left.values + total[left.indices]
        return Stream(None, total)
    if right.indices is not None:
        total = left.values.copy()
        total[right.indices] += right.values
        return Stream(None, total)
    return Stream(None, left.values + right.values)


def _merged(left: Array, left_values: Array, right: Array, right_values: Array) -> Stream:
    """Two rising lists made one, with the values of an index that is in both added.

    Cost: linear, as a stable sort of two runs is a merge.  The left one of two equal indices comes
    first, which keeps the order of the operands.
    """
    indices = np.concatenate([left, right])
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    values = np.concatenate([left_values, right_values])[order]
    again = np.zeros(len(indices), bool)
    np.equal(indices[1:], indices[:-1], out=again[1:])
    second = np.flatnonzero(again)
    values[second - 1] += values[second]
    kept = np.flatnonzero(~again)
    return Stream(indices[kept], values[kept])
