"""Vectors of few non-zeros as pairs of index and value: read from the caller, and added."""

import operator
import sys
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from collectives.calls.engine import Engine
from collectives.errors import InvalidBuffer, MismatchError
from collectives.execution.traffic import Traffic

Array = npt.NDArray[Any]

_INDEX_TYPES = (np.dtype(np.uint32), np.dtype(np.uint64))
_COMPARED = ("length", "dense_at", "type of the values", "type of the indices", "algorithm")
#: Ways of a sum.
ALGORITHMS = ("recursive_doubling", "split_allgather", "pruned_ring")
#: Bytes of an index on the wire, unless it lies far from the one before; and what far is.
GAP_BYTES, _FAR = 2, 0xFFFF


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


def packed(indices: Array) -> Array:
    """Rising indices as bytes: 16 bits each, one more than the gap before the index, or 0 where the
    gap has 65,535 places or more.  These gaps follow, in the indices' own type.
    """
    gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
    is_far = gaps >= _FAR
    near = np.where(is_far, 0, gaps + 1).astype(np.uint16)
    return np.concatenate([near.view(np.uint8), gaps[is_far].astype(indices.dtype).view(np.uint8)])


def unpacked(data: Array, pairs: int, kind: "np.dtype[Any]") -> Array:
    """Indices that :func:`packed` wrote; shape (pairs,)."""
    steps = data[: GAP_BYTES * pairs].view(np.uint16).astype(np.int64)
    steps[steps == 0] = data[GAP_BYTES * pairs :].view(kind).astype(np.int64) + 1
    return (np.cumsum(steps) - 1).astype(kind)


def agreed(
    engine: Engine,
    indices: object,
    values: object,
    length: object,
    dense_at: object,
    traffic: object,
    algorithm: object,
) -> tuple[Stream, int, int]:
    """This rank's pairs, the length, and the most pairs that travel as such, once no rank refuses
    its arguments."""
    problem, mine, told = None, None, None
    size = limit = 0
    try:
        mine, size, limit = _read(indices, values, length, dense_at, traffic)
        assert mine.indices is not None, "callers give pairs"
        if algorithm not in ALGORITHMS:
            raise InvalidBuffer(f"algorithm is {algorithm!r}; there are {', '.join(ALGORITHMS)}")
        told = size, limit, mine.values.dtype.name, mine.indices.dtype.name, algorithm
    except Exception as error:  # whatever it is: the others are waiting
        problem = error
    every = engine.resources.agreed("sparse_allreduce", problem, told)
    assert mine is not None, "no rank has a problem"
    for what, each in zip(_COMPARED, zip(*every)):
        if len(set(each)) > 1:
            raise MismatchError(
                f"the ranks' sparse_allreduce differ in {what}: {min(each)} and {max(each)}"
            )
    return mine, size, limit


def _read(
    indices: Any, values: Any, length: object, dense_at: object, traffic: object
) -> tuple[Stream, int, int]:
    """Understands one rank's arguments; raises :class:`InvalidBuffer`, or what NumPy raises."""
    size = _whole_number("length", length)
    most = size if dense_at is None else _whole_number("dense_at", dense_at)
    if not isinstance(traffic, Traffic | None):
        raise InvalidBuffer(f"traffic is a Traffic, not a {type(traffic).__name__}")
    at, given = np.array(indices), np.array(values)  # copies, so that no result is the caller's
    if at.ndim != 1 or at.shape != given.shape:
        raise InvalidBuffer(
            f"indices and values are lists of the same length, not of shapes {at.shape} and "
            f"{given.shape}"
        )
    if at.dtype not in _INDEX_TYPES:
        raise InvalidBuffer(f"indices are of type {at.dtype}; convert them to uint32 or uint64")
    number = given.dtype.kind in "fc" or (given.dtype.kind == "V" and given.dtype.type != np.void)
    if not number or not given.dtype.isnative:
        raise InvalidBuffer(f"values are of type {given.dtype}; convert them to floating point")
    if size * given.itemsize > sys.maxsize:
        raise InvalidBuffer(f"a vector of {size} values of {given.dtype} has too many bytes")
    expect_rising(at, size)
    pair = GAP_BYTES + given.itemsize
    limit = size * given.itemsize // pair if dense_at is None else min(most, size)
    return Stream(at, given), size, limit


def expect_rising(indices: Array, length: int) -> None:
    """Raises :class:`InvalidBuffer`: indices do not rise, or lie outside of a vector."""
    falling = np.flatnonzero(indices[1:] <= indices[:-1])
    if falling.size:
        k = int(falling[0])
        if indices[k] == indices[k + 1]:
            raise InvalidBuffer(f"index {indices[k]} comes twice; add its values up first")
        after = f"index {indices[k + 1]} comes after {indices[k]}"
        raise InvalidBuffer(f"{after}; sort the pairs by index")
    if indices.size and int(indices[-1]) >= length:
        raise InvalidBuffer(f"index {indices[-1]} lies outside of a vector of {length} values")


def _whole_number(name: str, value: object) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, SupportsIndex):
        raise InvalidBuffer(f"{name} is {value!r}, of type {type(value).__name__}; give an integer")
    number = operator.index(value)
    if not 0 <= number <= sys.maxsize:
        raise InvalidBuffer(f"{name} cannot be {number}; it lies in 0..{sys.maxsize}")
    return number
