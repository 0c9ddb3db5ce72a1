"""What the command lines of both packages have in common."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from collectives.about import version


class _Version(argparse.Action):
    """``--version``: looked up only when it is asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(version(parser.prog.removeprefix("python -m ")))
        parser.exit()


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds ``--version``."""
    told = "this program's, the MPI library's, mpi4py's, NumPy's and Python's"
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=told)


def add_verbose(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Adds ``-v``, or other ``flags`` for the same; before the command and after it."""
    parser.add_argument(
        *(flags or ("-v", "--verbose")),
        dest="verbose",
        action="store_true",
        default=argparse.SUPPRESS,
        help="say on rank 0 which algorithm each collective takes, and why",
    )


def show_log(options: argparse.Namespace, rank: int) -> None:
    """Writes the log of ``collectives`` to rank 0's stderr, if ``-v`` was given."""
    if rank == 0 and "verbose" in options:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("collectives").setLevel(logging.INFO)


@contextmanager
def while_read() -> Iterator[None]:
    """Ends the program without a word where what reads its output has ended, as ``head`` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter writes what is left once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
