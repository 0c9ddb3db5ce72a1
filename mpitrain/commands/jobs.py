"""The arguments of commands that read a job."""

import argparse
from pathlib import Path


def add_job(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """Adds ``CONFIG`` and ``--set``."""
    words = "the job file, or the name of an example (see the command examples)"
    number = None if needed else "?"
    parser.add_argument("config", type=Path, nargs=number, metavar="CONFIG", help=words)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="replace a value of the job file, as in optim.lr=0.1 or model.hidden=[128,64]; may "
        "be given several times",
    )
