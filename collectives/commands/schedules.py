"""``list``, ``verify`` and ``draw``: the schedules, their proofs, their pictures."""

import argparse
import re
import sys
import time
from pathlib import Path

from collectives.algorithms import ALGORITHMS, REGISTRY, Algorithm, build, find, names, parse
from collectives.analysis.claims import prove_claims
from collectives.analysis.figure import MOST_RANKS as DRAWN
from collectives.analysis.figure import figure
from collectives.analysis.grid import MOST_RANKS as PRINTED
from collectives.analysis.grid import grid
from collectives.analysis.user_code import packaged, resolve
from collectives.analysis.verify import Proof, verify
from collectives.commands.arguments import add_collective, add_drawn, add_ranks, drawn
from collectives.commands.program import Commands
from collectives.compile.cost import count, expect_countable
from collectives.contracts import CONTRACTS
from collectives.errors import CollectiveError, TooLarge, UnknownAlgorithm
from collectives.schedule import Schedule

#: Ranks up to which tables prove schedules: for how often they round, or as a program's own.
MOST_PROVED = 64


def add(commands: Commands) -> None:
    """Adds ``list``, ``verify`` and ``draw``."""
    listing = commands.add_parser("list", help="list the algorithms, their costs and papers")
    add_collective(listing, or_file=True)
    add_ranks(listing, 8)
    listing.set_defaults(run=_list)

    proving = commands.add_parser("verify", help="prove algorithms on many numbers of ranks")
    add_collective(proving, or_file=True)
    only = "prove only this algorithm, NAME:key=value with options, or mine.py:name"
    proving.add_argument("--algorithm", help=only)
    add_ranks(proving, "1-33,64")
    proving.set_defaults(run=_verify)

    drawing = commands.add_parser("draw", help="draw an algorithm in the terminal and a picture")
    add = drawing.add_argument
    add_drawn(drawing, "; all: all collectives and algorithms")
    add_ranks(drawing, 8)
    drawing.description = f"Pictures show up to {DRAWN} ranks, --text up to {PRINTED}."
    file = "a .png or .svg (COLLECTIVE_ALGORITHM_RANKS.png); for all, a folder (pictures)"
    add("-o", "--output", type=Path, help=file)
    add("--text", action="store_true", help="print the grid, write no PNG")
    drawing.set_defaults(run=_draw)


def _list(options: argparse.Namespace) -> int:
    print(
        f"{options.ranks} ranks; latency: messages one after the other; sent: buffers that the "
        "busiest rank sends; rounded: additions that round a contribution, at most"
    )
    print(
        f"{'collective':<15}{'algorithm':<20}{'latency':>7}{'sent':>7}{'rounded':>8}"
        "  order  in place  summary"
    )
    for algorithm in _listed(options.collective):
        try:
            schedule = REGISTRY.schedule(algorithm.collective, algorithm.name, options.ranks)
            expect_countable(schedule)
            cost = count(schedule)
            costs = f"{cost.latency:>7}{cost.sent:>7.2f}{_rounded(schedule):>8}"
        except (TooLarge, UnknownAlgorithm):  # not at this size
            costs = f"{'-':>7}{'-':>7}{'-':>8}"
        reference = f" [{algorithm.reference}]" if algorithm.reference else ""
        print(
            f"{algorithm.collective:<15}{algorithm.name:<20}{costs}  "
            f"{'kept' if algorithm.keeps_order else '-':<5}  "
            f"{'yes' if algorithm.in_place else 'by a copy':<9} "
            f"{algorithm.summary}{reference}".rstrip()
        )
    return 0


def _rounded(schedule: Schedule) -> str:
    if not schedule.contract.reduces:
        return "-"
    return str(verify(schedule).roundings) if schedule.size <= MOST_PROVED else "?"


def _listed(which: str | None) -> list[Algorithm]:
    """Algorithms of a collective, of a file, or all, installed packages' included."""
    if which is not None and which not in CONTRACTS:
        name = parse(resolve(which))[0]
        return [a for a in REGISTRY if a.name == name and a not in ALGORITHMS]
    for name in packaged():
        try:
            resolve(name)
        except CollectiveError as error:
            print(f"collectives: {error}", file=sys.stderr)
    return [a for a in REGISTRY if which in (None, a.collective)]


def _verify(options: argparse.Namespace) -> int:
    if options.collective and options.collective not in CONTRACTS:
        if options.algorithm:
            raise UnknownAlgorithm("name one algorithm: a file, or --algorithm")
        options.collective, options.algorithm = None, options.collective
    if options.algorithm:
        options.algorithm = resolve(options.algorithm)
    begun = time.perf_counter()
    proved = 0
    left_out: UnknownAlgorithm | None = None
    for collective, algorithm in _chosen(options.collective, options.algorithm):
        messages, sizes = 0, []
        for size in options.ranks:
            try:
                messages += _prove(collective, algorithm, size).messages
                sizes.append(size)
            except UnknownAlgorithm as error:
                left_out = error
        proved += len(sizes)
        print(f"{collective:<15}{algorithm:<28}{len(sizes)} sizes, {messages} messages")
        if len(sizes) < len(options.ranks):
            print(f"{'':<15}not on {len(options.ranks) - len(sizes)} sizes: {left_out}")
    if left_out is not None and not proved:
        raise left_out
    print(f"{proved} schedules proved in {time.perf_counter() - begun:.1f} s")
    return 0


def _prove(collective: str, algorithm: str, size: int) -> Proof:
    """Proves a schedule, also in place if it claims that, and without segments all its claims."""
    schedule = build(collective, algorithm, size)
    name, options = parse(algorithm)
    if "segments" not in options:
        return prove_claims(find(collective, name), schedule)
    proof = verify(schedule)
    if schedule.in_place:
        verify(schedule, in_place=True)
    return proof


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
    collective, algorithm = drawn(options)
    if algorithm == "all":
        return _draw_all(options)
    algorithm = resolve(algorithm)
    schedule = build(collective, algorithm, options.ranks)
    plain = re.sub(r"\W+", "_", algorithm)
    path = options.output or Path(f"{collective}_{plain}_{options.ranks}.png")
    if not options.text:
        figure(schedule, path)
    print(grid(schedule))
    if not options.text:
        print(f"wrote {path}")
    return 0


def _draw_all(options: argparse.Namespace) -> int:
    """One picture for every algorithm of the registry."""
    folder = options.output or Path("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for algorithm in ALGORITHMS:
        try:
            schedule = algorithm.schedule(options.ranks)
        except CollectiveError as reason:  # not at this size
            print(f"{algorithm.collective} {algorithm.name}: {reason}")
            continue
        path = folder / f"{algorithm.collective}_{algorithm.name}_{options.ranks}.png"
        figure(schedule, path)
        print(f"wrote {path}")
    return 0
