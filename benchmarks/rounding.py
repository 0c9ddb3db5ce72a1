"""Distance of each all-reduce's sums from the exact ones, as each adds in its own order.

python -m benchmarks.rounding -n 8
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import program
from collectives.algorithms import build, names
from collectives.bench.inputs import parse_dtype
from collectives.commands.arguments import known, not_negative, positive, rank_count
from collectives.errors import CollectiveError, UnknownAlgorithm
from collectives.execution.exact import exact_sum
from collectives.execution.local import run
from collectives.execution.memory import Items


class Rounding(NamedTuple):
    """Errors of one algorithm's sums, in units in the last place of the rounded exact sum.

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


def measure(wanted: Sequence[str], inputs: list[Items]) -> Iterator[Rounding]:
    """Results of all ranks in this process; algorithms for other numbers of ranks are left out."""
    exact = np.empty_like(inputs[0])
    exact_sum(inputs, exact)
    for name in wanted:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each algorithm."""
    parser = argparse.ArgumentParser(prog="benchmarks.rounding", description=__doc__)
    add = parser.add_argument
    add("-n", "--ranks", type=rank_count, default=8, help="number of ranks (8)")
    add("-d", "--datatype", default="float", help="float, double or half (float)")
    add("--count", type=positive, default=100_000, help="numbers a rank (100000)")
    spread = "powers of ten of the numbers' sizes (3)"
    add("--spread", type=not_negative, default=3.0, help=spread)
    add("--seed", type=int, default=0, help="seed of the numbers (0)")
    which = "names with options, mine.py:name, or all (all)"
    add("--algorithm", default="all", metavar="A,B", help=which)
    return program.run(parser, arguments, rounding)


def rounding(options: argparse.Namespace) -> int:
    """A row for each algorithm."""
    try:
        dtype = parse_dtype(options.datatype)
    except ValueError as error:
        raise CollectiveError(str(error)) from None
    if dtype.kind != "f":
        raise CollectiveError(f"sums of {dtype} are exact, or not looked at; name float or double")
    if options.spread > 30 or options.seed < 0:
        raise CollectiveError("--spread is at most 30, and --seed a number from 0 on")
    wanted = [*known(options.algorithm, names("allreduce")).values()]
    inputs = drawn(options.ranks, options.count, dtype, options.spread, options.seed)
    print(f"all-reduce of {options.count} x {dtype} on {options.ranks} ranks, last places from the")
    print("exact sum, rounded (Communicator(..., reproducible=True) gives that one)")
    print(f"{'algorithm':<24}{'largest':>9}{'mean':>9}{'right':>9}")
    found = []
    for row in measure(wanted, inputs):
        found.append(row)
        print(f"{row.algorithm:<24}{row.largest:>9}{row.mean:>9.3f}{row.right:>9.1%}", flush=True)
    if not found:
        raise UnknownAlgorithm(f"--algorithm names none that is for {options.ranks} ranks")
    if len(found) > 1:
        print(f"not all of them have the same bits in {disagreement(found):.1%} of the sums")
    return 0


if __name__ == "__main__":
    sys.exit(main())
