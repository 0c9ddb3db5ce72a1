"""A program that is run as it is: its words, its place in the path, its end."""

import argparse
import importlib.util
import io
import os
import pkgutil
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any


def named_profile(given: Sequence[str], valued: Sequence[str]) -> list[str]:
    """The words with ``--profile=profile`` for a ``--profile`` without ``=``, which takes no word;
    the program may have one of its own.  ``valued`` are the options that take a word."""
    words, before = list(given), ""
    for place, word in enumerate(words):
        if not word.startswith("-") and before not in valued:
            break
        words[place], before = f"{word}=profile" if word == "--profile" else word, word
    return words


def parse(parser: Any, given: Sequence[str], valued: Sequence[str] = ()) -> argparse.Namespace:
    """Reads options, ``--profile`` and the program; ``valued`` are the options that take a word."""
    profile = "at the end, print who waited for whom, and write FILE.html and FILE.json (profile)"
    parser.add_argument("--profile", metavar="FILE", help=profile)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT", help="file that is run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    options: argparse.Namespace = parser.parse_args(named_profile(given, valued))
    if not options.module and not os.path.exists(options.script):
        parser.error(f"there is no file {options.script}")
    return options


def run_program(options: argparse.Namespace) -> None:
    """Runs the program as Python does, as ``__main__``, which it stays for threads and handlers of
    the end that pickle what it defines."""
    sys.argv = [options.script, *options.arguments]
    if not sys.flags.safe_path:
        file = os.path.realpath(options.script)
        sys.path[0] = os.getcwd() if options.module else os.path.dirname(file)
    main = sys.modules["__main__"] = ModuleType("__main__")
    if options.module:
        # The public run_module takes its __main__ away as soon as the module's last line has run.
        runpy._run_module_as_main(options.script)  # type: ignore[attr-defined]
    elif pkgutil.get_importer(options.script) is None:  # neither a folder nor an archive
        main.__file__ = os.path.abspath(options.script)
        with io.open_code(main.__file__) as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, vars(main))
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
    options = parse(parser, given)
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
        except (ImportError, RuntimeError):
            from collectives.about import has_no_mpi, load_mpi_or_exit

            if has_no_mpi():
                load_mpi_or_exit(parser)
            raise
    return 0


def when_mpi_starts(begin: Callable[[Any], None]) -> None:
    """Calls ``begin`` with the module ``mpi4py.MPI`` once it is imported and MPI initialised."""

    def loaded(module: Any) -> None:
        if module.Is_initialized():
            begin(module)
        else:  # the program has switched mpi4py.rc.initialize off
            for name in ("Init", "Init_thread"):
                start = getattr(module, name)
                setattr(module, name, partial(_followed, start, lambda *_: begin(module)))

    when_imported("mpi4py.MPI", loaded)


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Calls ``then`` with a module as soon as a program has imported it."""

    def find(asked: str, path: object = None, target: object = None) -> Any:
        if asked != name:
            return None
        sys.meta_path.remove(finder)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader.exec_module = partial(_followed, spec.loader.exec_module, then)
        return spec

    finder: Any = SimpleNamespace(find_spec=find)
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, finder)


def _followed(function: Callable[..., Any], then: Callable[..., None], *given: Any) -> Any:
    found = function(*given)
    then(*given)
    return found
