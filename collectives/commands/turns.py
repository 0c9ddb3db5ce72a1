"""``turns``: shows or forgets the findings of ``auto`` by turns on this host."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives.commands.arguments import Commands


def add(commands: "Commands") -> None:
    """Adds ``turns``."""
    parser = commands.add_parser(
        "turns", help="show the algorithms that auto has found by turns (COLLECTIVES_TURNS=1)"
    )
    parser.add_argument("--forget", action="store_true", help="forget them")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the findings, or removes them."""
    from collectives.calls.remembered import findings, forget, where

    if options.forget:
        print(f"forgot {forget()} findings: {where()}")
        return 0
    found = findings()
    print(f"{len(found)} findings in {where()}")
    for one in found:
        print(
            f"{one.kind}: {one.algorithm} ({one.ours} is {one.ratio:.2f}x native; {one.host}, "
            f"{one.day})"
        )
    return 0
