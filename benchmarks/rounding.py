"""How far the sums of all-reduce algorithms are from the exact ones: each adds in its own order."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.algorithms import build
from collectives.errors import UnknownAlgorithm
from collectives.execution.exact import exact_sum
from collectives.execution.local import run
from collectives.execution.memory import Items


class Rounding(NamedTuple):
    """Of one algorithm's sums, in units in the last place of the exact sum, rounded.

    Attributes:
        largest, mean: distance over all items.
        right: share of the items that are the exact sum, rounded.
        total: the sums.
    """

    algorithm: str
    largest: int
    mean: float
    right: float
    total: Items


def drawn(size: int, count: int, dtype: "np.dtype[Any]", spread: float, seed: int) -> list[Items]:
    """``count`` numbers of each rank, normal, times powers of ten from ``-spread`` to 0."""
    rng = np.random.default_rng(seed)
    powers = 10.0 ** rng.uniform(-spread, 0.0, (size, count))
    return [*(rng.standard_normal((size, count)) * powers).astype(dtype)]


def measure(names: Sequence[str], inputs: list[Items]) -> Iterator[Rounding]:
    """All ranks in this process.  Algorithms that are not for so many ranks are left out."""
    exact = np.empty_like(inputs[0])
    exact_sum(inputs, exact)
    for name in names:
        try:
            schedule = build("allreduce", name, len(inputs))
        except UnknownAlgorithm:
            continue
        total, *_ = run(schedule, inputs)
        assert total is not None, "every rank of an all-reduce has its result"
        off = np.abs(_place(total) - _place(exact))
        yield Rounding(name, int(off.max()), float(off.mean()), float((off == 0).mean()), total)


def _place(values: Items) -> npt.NDArray[np.int64]:
    """The number of each value when all of its type are counted from 0 up and down."""
    bits = values.view(f"i{values.itemsize}").astype(np.int64)
    lowest = -(1 << (8 * values.itemsize - 1))
    return np.where(bits < 0, lowest - bits, bits)


def disagreement(found: Sequence[Rounding]) -> float:
    """Share of the items on which not all algorithms have the same bits."""
    first = found[0].total
    other = np.zeros(first.size, bool)
    for one in found[1:]:
        other |= one.total != first
    return float(other.mean())
