"""``mpitrain schedules``: pipeline schedules proved, timed and drawn."""

import argparse
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from collectives.commands import above_zero, positive
from mpitrain.config import ConfigError
from mpitrain.pipeline.actions import loop
from mpitrain.pipeline.schedules import SCHEDULES

if TYPE_CHECKING:
    from collectives.commands import Commands

#: Passes of a schedule that are proved and drawn in a minute.
_MOST = 1 << 15
#: Columns of a line in the terminal for the longest pass.
_WIDEST = 1000


def add(commands: "Commands") -> None:
    """Adds the command."""
    parser = commands.add_parser("schedules", help="prove, time and draw pipeline schedules")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCHEDULES))
    parser.add_argument("-p", "--stages", type=positive, default=4, help="stages (4)")
    parser.add_argument(
        "--replicas",
        type=positive,
        nargs="+",
        metavar="R",
        help="replicas of each stage, as 2 1 1; a pass on one of R takes R times as long (1 each)",
    )
    several = "micro-batches of each replica of the widest stage (8)"
    parser.add_argument("-m", "--micro-batches", type=positive, default=8, help=several)
    parser.add_argument(
        "--chunks", type=positive, default=2, help="chunks a stage, if interleaved (2)"
    )
    parser.add_argument(
        "--times",
        type=above_zero,
        nargs=3,
        default=(1.0, 1.0, 1.0),
        metavar="T",
        help="times of a forward pass and of the two halves of a backward pass (1 1 1)",
    )
    parser.add_argument("-o", "--output", type=Path, help="folder for pictures")
    parser.set_defaults(act=schedules)


def schedules(options: argparse.Namespace) -> None:
    """Prove, time and draw schedules."""
    from mpitrain.pipeline import draw
    from mpitrain.pipeline.replay import replay
    from mpitrain.pipeline.simulate import PassTimes, balanced, simulate

    unknown = set(options.names) - set(SCHEDULES)
    if unknown:
        raise ConfigError(f"no schedule {sorted(unknown)[0]!r}; there are {', '.join(SCHEDULES)}")
    times = PassTimes(*options.times)
    if max(options.times) > _WIDEST * min(options.times):
        raise ConfigError(
            f"--times: a line has a column for the shortest pass, and the longest may have "
            f"{_WIDEST}; give times that are less unequal"
        )
    replicas = tuple(options.replicas or (1,) * options.stages)
    p, m = len(replicas), options.micro_batches * lcm(*replicas)
    if p * m * options.chunks > _MOST:
        raise ConfigError(
            f"{p} stages with {m} micro-batches and {options.chunks} chunks are too many to draw; "
            f"their product may be {_MOST}"
        )
    for schedule in map(SCHEDULES.__getitem__, options.names or SCHEDULES):
        pipeline = schedule.pipeline(replicas, m, options.chunks)
        try:
            report = replay(schedule.generate, pipeline)
        except ValueError as error:
            if options.names:
                raise
            print(f"{schedule.name}: {error}")  # it is not for such a pipeline; others are
            continue
        found = simulate(schedule.generate, pipeline, balanced(pipeline, times))
        formula = ""
        # In a V, the formula is of equal passes.
        is_claimed = schedule.placement is loop or len(set(options.times)) == 1
        if is_claimed and m >= schedule.fills * p and max(pipeline.replicas) == 1:
            share = schedule.bubble(p, m, pipeline.chunks, *options.times)
            formula = f" (formula {schedule.bubble.__doc__}: {share:.1%})"
        print(f"{schedule.name}: {schedule.description}")
        print(
            f"  bubble {found.bubble:.1%}{formula}, activations of "
            f"{'chunks' if pipeline.chunks > 1 else 'stages'} held "
            f"{[report.held[place] for place in pipeline.places()]}, oldest weights "
            f"{max(report.staleness.values())} updates"
        )
        print(draw.text(found, pipeline, min(options.times) / pipeline.chunks))
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            rows = [
                (f"stage {draw.place_name(place, pipeline)}", blocks)
                for place, blocks in draw.by_place(found, pipeline).items()
            ]
            path = options.output / f"{schedule.name}.png"
            shape = "-".join(map(str, replicas)) if max(replicas) > 1 else f"{p} stages"
            draw.picture(rows, path, f"{schedule.name}, {shape}, {m} micro-batches")
            print(f"  drawn in {path}")
