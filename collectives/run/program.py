"""A program that is run as it is: its words, its place in the path, its end."""

import argparse
import importlib.util
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any, cast


def add_program(parser: argparse.ArgumentParser) -> None:
    """Adds the program with its arguments."""
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT", help="file that is run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def run_program(options: argparse.Namespace) -> None:
    """Runs the program as Python does, as ``__main__``."""
    sys.argv = [options.script, *options.arguments]
    if not sys.flags.safe_path:
        file = os.path.realpath(options.script)
        sys.path[0] = os.getcwd() if options.module else os.path.dirname(file)
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.script, run_name="__main__")


def main(given: Sequence[str]) -> int:
    """``run``: returns the exit status, unless the program ends the process."""
    parser = argparse.ArgumentParser(
        prog="python -m collectives run",
        description="Runs a program of mpi4py, unchanged: MPI.COMM_WORLD, and what it splits, "
        "duplicates or arranges in a grid, has our collectives where they are faster.",
        usage="mpirun -n RANKS %(prog)s [--gains] [--profile[=FILE]] [-m] SCRIPT [ARGUMENT ...]",
    )
    gains = "at the end, print which algorithm each call site of rank 0 took, and why"
    parser.add_argument("--gains", action="store_true", help=gains)
    profile = "at the end, print who waited for whom, and write FILE.html and FILE.json (profile)"
    parser.add_argument("--profile", metavar="FILE", help=profile)
    add_program(parser)
    # Without "=", the next word is the script.
    own = next((n for n, word in enumerate(given) if not word.startswith("-")), len(given))
    words = [f"{word}=profile" if word == "--profile" else word for word in given[:own]]
    options = parser.parse_args([*words, *given[own:]])
    if not options.module and not os.path.exists(options.script):
        parser.error(f"there is no file {options.script}")
    # An exception in a thread ends no job of plain mpi4py either.
    os.environ.setdefault("COLLECTIVES_ABORT", "0")
    with ExitStack() as ends:

        def begin(module: Any) -> None:
            from collectives.errors import LaunchError
            from collectives.failure.abort import abort_on_exception
            from collectives.run.world import install

            try:
                install(module, options.gains, options.profile)
            except LaunchError as error:
                parser.exit(2, f"{parser.prog}: {error}\n")
            ends.enter_context(abort_on_exception(module.COMM_WORLD))

        when_mpi_starts(begin)
        try:
            run_program(options)
        except KeyboardInterrupt:
            traceback.print_exc()
            raise SystemExit(128 + signal.SIGINT) from None
    return 0


def when_mpi_starts(begin: Callable[[Any], None]) -> None:
    """Calls ``begin`` with the module ``mpi4py.MPI`` once it is imported and MPI initialised."""

    def find(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(finder)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = partial(followed, load, loaded)
        return cast(ModuleSpec, spec)

    def loaded(module: Any) -> None:
        if module.Is_initialized():
            begin(module)
        else:  # the program has switched mpi4py.rc.initialize off
            for name in ("Init", "Init_thread"):
                start = getattr(module, name)
                setattr(module, name, partial(followed, start, lambda *_: begin(module)))

    def followed(function: Callable[..., Any], then: Callable[..., None], *given: Any) -> Any:
        found = function(*given)
        then(*given)
        return found

    finder: Any = SimpleNamespace(find_spec=find)
    sys.meta_path.insert(0, finder)
