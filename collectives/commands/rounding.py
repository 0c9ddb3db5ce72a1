"""The command ``rounding``: how exact the sums of each all-reduce are."""

import argparse
from typing import TYPE_CHECKING

from collectives.algorithms import names
from collectives.commands.arguments import add_algorithms, known, not_negative, positive, rank_count
from collectives.errors import CollectiveError, UnknownAlgorithm

if TYPE_CHECKING:
    from collectives.commands.arguments import Commands


def add(commands: "Commands") -> None:
    """Adds ``rounding``."""
    parser = commands.add_parser(
        "rounding",
        help="show how far each all-reduce's sums are from the exact ones, in last places",
    )
    parser.add_argument("-n", "--ranks", type=rank_count, default=8, help="number of ranks (8)")
    parser.add_argument("-d", "--datatype", default="float", help="float, double or half (float)")
    parser.add_argument("--count", type=positive, default=100_000, help="numbers a rank (100000)")
    spread = "powers of ten over which the numbers' sizes spread (3)"
    parser.add_argument("--spread", type=not_negative, default=3.0, help=spread)
    parser.add_argument("--seed", type=int, default=0, help="seed of the numbers (0)")
    add_algorithms(parser)
    parser.set_defaults(run=rounding)


def rounding(options: argparse.Namespace) -> int:
    """A row for each algorithm."""
    from collectives.bench.inputs import parse_dtype
    from collectives.bench.rounding import disagreement, drawn, measure

    try:
        dtype = parse_dtype(options.datatype)
    except ValueError as error:
        raise CollectiveError(str(error)) from None
    if dtype.kind != "f":
        raise CollectiveError(f"sums of {dtype} are exact, or not looked at; name float or double")
    if options.spread > 30 or options.seed < 0:
        raise CollectiveError("--spread is at most 30, and --seed a number from 0 on")
    wanted = names("allreduce") if options.algorithm == "all" else known(options.algorithm)
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
