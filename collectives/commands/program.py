"""Common parts of the command lines of both packages."""

import argparse
import errno
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from collectives.about import version
from collectives.errors import hint

#: Errors of a write without room, or on a device that fails.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Version(argparse.Action):
    """``--version``: looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(version(parser.prog.removeprefix("python -m ")))
        parser.exit()


class _Command(argparse.ArgumentParser):
    """A command, which refuses unknown words itself: with its own usage, and the nearest option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known = self._option_string_actions
        words = args[: args.index("--")] if "--" in args else args
        has_rest = any(one.nargs == argparse.REMAINDER for one in self._actions)
        # Before the value of one is taken for the command's first word.
        for option in () if has_rest else (word.partition("=")[0] for word in words):
            if option.startswith("--") and not any(one.startswith(option) for one in known):
                self._refuse(option)
        found, left = super().parse_known_args(args, namespace)
        if left:
            self._refuse(" ".join(left))
        return found, left

    def _refuse(self, words: str) -> None:
        near = hint(words.partition("=")[0], self._option_string_actions, "options are")
        self.error(f"unrecognized arguments: {words}; {near}")


class Commands(argparse._SubParsersAction):
    """The commands of a program; a command's ``help`` is its description by default."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """A command, with ``help`` as its description if it has none."""
        text = str(options["help"])
        options.setdefault("description", f"{text[:1].upper()}{text[1:]}.")
        made: argparse.ArgumentParser = super().add_parser(name, **options)
        return made


def add_commands(parser: argparse.ArgumentParser, **options: Any) -> Commands:
    """Adds ``COMMAND``; each command has a ``help``, and a ``description`` if there is more to say.

    Args:
        parser: the program's.
        options: keyword arguments of :meth:`argparse.ArgumentParser.add_subparsers`.
    """
    made = parser.add_subparsers(
        parser_class=_Command, action=Commands, required=True, metavar="COMMAND", **options
    )
    return cast(Commands, made)


def parsed(parser: argparse.ArgumentParser, given: Sequence[str] | None) -> argparse.Namespace:
    """The parsed options; without any argument, prints the commands and exits.

    Completes words for a shell that asks for it, if argcomplete is installed.

    Args:
        parser: the program's.
        given: the arguments; those of the process by default.
    """
    if "_ARGCOMPLETE" in os.environ:
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)
    return parser.parse_args((sys.argv[1:] if given is None else given) or ["--help"])


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds ``--version``."""
    which = "print the versions of this program, the MPI library, mpi4py, NumPy and Python"
    parser.add_argument(
        "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=which
    )


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Adds ``-v``; before the command and after it."""
    parser.add_argument(
        "-v",
        "--verbose",
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


def refuse(rank: int, error: Exception | str) -> int:
    """Prints an error on rank 0; returns the exit status."""
    if rank == 0:
        print(f"collectives: {error}", file=sys.stderr)
    return 2


@contextmanager
def while_read() -> Iterator[None]:
    """Ends the program where its output cannot be written.

    Nothing is printed if the reader has ended, as ``head`` does; a full disk gives a sentence and
    status 1.
    """
    try:
        try:
            yield
        except SystemExit:  # --version has printed
            print(end="", flush=True)
            raise
        print(end="", flush=True)  # nothing where there is no stdout
    except BrokenPipeError:
        _write_nothing_more()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        _write_nothing_more()
        print(f"collectives: the output cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _write_nothing_more() -> None:
    """Closes stdout, as the interpreter would write the rest once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
