"""Errors of a benchmark's command line: one sentence and exit status 2."""

import argparse
import sys
from collections.abc import Callable, Sequence

from collectives.commands.program import while_read
from collectives.errors import CollectiveError


def run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    act: Callable[[argparse.Namespace], int],
) -> int:
    """Parses ``arguments``, by default the process's, and returns the exit status of ``act``."""
    try:
        with while_read():
            return act(parser.parse_args(arguments))
    except CollectiveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
