"""``python -m collectives``: list, verify and draw need no MPI; bench runs under mpirun."""

import argparse
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from collectives import bench
from collectives.algorithms import ALGORITHMS, build, find, names, parse
from collectives.analysis import draw
from collectives.analysis.cost import count
from collectives.analysis.topology import TOPOLOGIES
from collectives.analysis.verify import verify
from collectives.bench import compare
from collectives.commands import models
from collectives.commands.mutate import survey
from collectives.contracts import CONTRACTS
from collectives.errors import CollectiveError, TooLarge


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m collectives",
        description="Collective algorithms over MPI: list, prove, draw and simulate them without "
        "MPI; measure them under mpirun, beside the MPI library's own.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="the algorithms, what they cost and who found them")
    listing.add_argument("collective", nargs="?", choices=CONTRACTS)
    listing.add_argument("-n", "--size", type=int, default=8, help="ranks for the costs (8)")
    listing.set_defaults(run=_list)

    proving = commands.add_parser("verify", help="prove every algorithm at many numbers of ranks")
    proving.add_argument("collective", nargs="?", choices=CONTRACTS)
    proving.add_argument("--algorithm", help="only this one, with options if it has any")
    proving.add_argument(
        "--ranks", type=_ranks, help="e.g. 1-33,64 (the default; of mutations, 2-5)"
    )
    proving.add_argument(
        "--mutations",
        action="store_true",
        help="break every step of every schedule and count how many of these the proof rejects",
    )
    proving.set_defaults(run=_verify)

    drawing = commands.add_parser("draw", help="one algorithm: a grid in the terminal and a PNG")
    drawing.add_argument("algorithm", help="its name, with options if it has any, or all")
    drawing.add_argument("-c", "--collective", choices=CONTRACTS, default="allreduce")
    drawing.add_argument("-n", "--size", type=int, default=8, help="ranks (8)")
    drawing.add_argument("-o", "--output", type=Path, help="the PNG, or the folder for all")
    drawing.add_argument("--text", action="store_true", help="only the grid")
    drawing.set_defaults(run=_draw)

    measuring = commands.add_parser("bench", help="measure, under mpirun, beside the MPI library")
    bench.add_arguments(measuring)
    measuring.set_defaults(run=bench.run)

    timing = commands.add_parser("simulate", help="which algorithm wins, on ranks nobody has")
    timing.add_argument("collective", nargs="?", choices=CONTRACTS, default="allreduce")
    timing.add_argument("--ranks", type=_powers, default=_powers("8..65536"), help="8..65536")
    timing.add_argument("--topology", choices=TOPOLOGIES, default="fat-tree")
    timing.add_argument("--size", type=bench.size, default=64 << 20, help="bytes (64M)")
    timing.add_argument("--ports", choices=("one", "multi"), default="one")
    timing.add_argument("--algorithm", default="all", metavar="A,B", help="names with options")
    timing.add_argument("--alpha", type=float, default=1.5, help="microseconds a message (1.5)")
    timing.add_argument("--bandwidth", type=float, default=25.0, help="GB/s of a port (25)")
    timing.add_argument("--plot", type=Path, help="write a PNG")
    timing.set_defaults(run=models.simulate_sizes)

    tuning = commands.add_parser(
        "tune", help="measure, under mpirun, what algorithm='auto' is to choose"
    )
    tuning.add_argument("collective", nargs="?", choices=CONTRACTS, help="one; default: all")
    tuning.add_argument("-b", "--minbytes", type=bench.size, default=8, help="smallest (8)")
    tuning.add_argument("-e", "--maxbytes", type=bench.size, default=16 << 20, help="largest (16M)")
    tuning.add_argument("-f", "--stepfactor", type=int, default=2, help="between sizes (2)")
    tuning.add_argument("--repeats", type=bench.positive, default=5, help="of each pass (5)")
    passes = "over everything, minutes apart: what a rule says holds in three of four repeats (2)"
    tuning.add_argument("--passes", type=bench.positive, default=2, help=passes)
    tuning.add_argument(
        "-o", "--output", type=Path, default=Path("tuned.json"), help="merged into (tuned.json)"
    )
    tuning.set_defaults(run=bench.run_tune)

    exporting = commands.add_parser(
        "export", help="a tuning table as a rules file for Open MPI's coll_tuned"
    )
    exporting.add_argument("table", type=Path, nargs="?", help="default: the one in use")
    exporting.set_defaults(run=_export)

    pricing = commands.add_parser(
        "cost", help="closed forms, ours and the textbook's, beside the simulator"
    )
    pricing.add_argument("-n", "--ranks", type=int, default=8, help="(8)")
    pricing.add_argument("--size", type=bench.size, default=1 << 20, help="bytes (1M)")
    pricing.add_argument("--alpha", type=float, default=1.5, help="microseconds a message (1.5)")
    pricing.add_argument("--bandwidth", type=float, default=25.0, help="GB/s of a port (25)")
    pricing.add_argument("--reduction", type=float, default=100.0, help="GB/s reduced (100)")
    pricing.set_defaults(run=models.cost)

    fitting = commands.add_parser(
        "fit", help="alpha, beta and gamma from files of 'bench -J', and how well they explain them"
    )
    fitting.add_argument("files", nargs="+", type=Path, metavar="JSON")
    fitting.add_argument("--memory", choices=("numpy", "shared"), default="numpy")
    fitting.set_defaults(run=models.fit_files)

    comparing = commands.add_parser("compare", help="several files of 'bench -J' in one table")
    comparing.add_argument("files", nargs="+", type=Path, metavar="JSON")
    comparing.add_argument(
        "--peers", action="store_true", help="one collective under several MPIs, ours and theirs"
    )
    comparing.set_defaults(run=_compare)

    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except CollectiveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _mutations(options: argparse.Namespace) -> int:
    print(
        f"{'collective':<11}{'algorithm':<21}{'ranks':>5}{'mutants':>9}{'rejected':>9}{'harmless':>9}{'missed':>7}"
    )
    totals = [0, 0, 0, 0]
    for collective, algorithm in _chosen(options.collective, options.algorithm):
        for size in options.ranks:
            counted = survey(build(collective, algorithm, size))
            totals = [a + b for a, b in zip(totals, counted)]
            print(f"{collective:<11}{algorithm:<21}{size:>5}" + _counts(counted))
    print(f"{'total':<37}" + _counts(totals))
    print("rejected: by the proof; harmless: a real run gave the right result; missed: neither")
    return int(totals[3] > 0)


def _counts(counted: Iterable[int]) -> str:
    return "".join(f"{n:>{width}}" for n, width in zip(counted, (9, 9, 9, 7)))


def _list(options: argparse.Namespace) -> int:
    print(
        f"latency: messages in a row; sent: by the busiest rank, in buffers; {options.size} ranks"
    )
    head = f"{'collective':<11}{'algorithm':<20}{'latency':>8}{'sent':>7}  order  in place  summary"
    print(head)
    for algorithm in ALGORITHMS:
        if options.collective not in (None, algorithm.collective):
            continue
        try:
            cost = count(algorithm.schedule(options.size))
            costs = f"{cost.latency:>8}{cost.sent:>7.2f}"
        except TooLarge:
            costs = f"{'-':>8}{'-':>7}"
        print(
            f"{algorithm.collective:<11}{algorithm.name:<20}{costs}  "
            f"{'kept' if algorithm.keeps_order else '-':<5}  "
            f"{'yes' if algorithm.in_place else 'by a copy':<9} "
            f"{algorithm.summary} [{algorithm.reference}]"
        )
    return 0


def _verify(options: argparse.Namespace) -> int:
    options.ranks = options.ranks or _ranks("2-5" if options.mutations else "1-33,64")
    if options.mutations:
        return _mutations(options)
    begun = time.perf_counter()
    proved = 0
    for collective, algorithm in _chosen(options.collective, options.algorithm):
        messages = 0
        for size in options.ranks:
            schedule = build(collective, algorithm, size)
            messages += verify(schedule).messages
            if schedule.in_place:
                verify(schedule, in_place=True)
        proved += len(options.ranks)
        print(f"{collective:<11}{algorithm:<28}{len(options.ranks)} sizes, {messages} messages")
    print(f"{proved} schedules proved in {time.perf_counter() - begun:.1f} s")
    return 0


def _chosen(collective: str | None, algorithm: str | None) -> list[tuple[str, str]]:
    """The registry's entries that the command line selects."""
    collectives = [collective] if collective else list(CONTRACTS)
    if algorithm is None:
        return [(c, name) for c in collectives for name in names(c)]
    chosen = [(c, algorithm) for c in collectives if parse(algorithm)[0] in names(c)]
    if not chosen:
        find(collectives[0], parse(algorithm)[0])
    return chosen


def _draw(options: argparse.Namespace) -> int:
    if options.algorithm == "all":
        return _draw_all(options)
    schedule = build(options.collective, options.algorithm, options.size)
    plain = re.sub(r"\W+", "_", options.algorithm)
    path = options.output or Path(f"{options.collective}_{plain}_{options.size}.png")
    if not options.text:
        draw.figure(schedule, path)
    print(draw.grid(schedule))
    if not options.text:
        print(f"wrote {path}")
    return 0


def _draw_all(options: argparse.Namespace) -> int:
    """One picture for every algorithm of the registry."""
    folder = options.output or Path("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for algorithm in ALGORITHMS:
        try:
            schedule = algorithm.schedule(options.size)
        except CollectiveError as reason:  # not of so many ranks
            print(f"{algorithm.collective} {algorithm.name}: {reason}")
            continue
        path = folder / f"{algorithm.collective}_{algorithm.name}_{options.size}.png"
        draw.figure(schedule, path)
        print(f"wrote {path}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    print((compare.peers if options.peers else compare.table)(options.files))
    return 0


def _export(options: argparse.Namespace) -> int:
    from collectives.bench.openmpi_rules import rules_file
    from collectives.calls.tuner import load

    print(rules_file(load(options.table)), end="")
    return 0


def _powers(text: str) -> list[int]:
    """``"8..64"`` -> ``[8, 16, 32, 64]``; ``"4,6"`` -> ``[4, 6]``."""
    first, dots, last = text.partition("..")
    if not dots:
        return _ranks(text)
    if not (first.isdecimal() and last.isdecimal()) or int(first) < 1:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}; write e.g. 8..65536 or 4,6,8")
    sizes = [int(first)]
    while 2 * sizes[-1] <= int(last):
        sizes.append(2 * sizes[-1])
    return sizes


def _ranks(text: str) -> list[int]:
    """``"1-4,8"`` -> ``[1, 2, 3, 4, 8]``."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < 1:
            raise argparse.ArgumentTypeError(f"cannot read {text!r}; write e.g. 1-33,64")
        sizes += range(int(first), int(last or first) + 1)
    return sizes


if __name__ == "__main__":
    sys.exit(main())
