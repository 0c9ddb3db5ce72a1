"""Ways to communicate less, side by side.

    mpirun -n 4 python -m benchmarks.matrix --out runs/matrix

Trains small models by each method, algorithm and layout, on each link, and writes
FOLDER/matrix.json and FOLDER/matrix.html: losses against seconds, bytes that were sent, what wins
and why.  Links other than shared memory are made up on one machine.  Cells in the file are not run
again.  Without a choice it is some 90 cells; with one, all combinations, with the first value of
each dimension that is not named.
"""

import argparse
import shlex
import sys
from pathlib import Path

from mpi4py import MPI

from benchmarks.matrix import cells
from benchmarks.matrix.run import Extent, run
from collectives import Communicator, abort_on_exception
from collectives.commands.arguments import above_zero, positive
from mpitrain.config import ConfigError
from mpitrain.ranks.threads import limit_blas_threads


def main() -> int:
    """Runs the cells; returns 2 where they cannot be."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_flags(parser)
    options = parser.parse_args()
    with Communicator(MPI.COMM_WORLD) as comm, abort_on_exception(comm), limit_blas_threads(comm):
        try:
            return matrix(comm, options)
        except ConfigError as error:
            if comm.rank == 0:
                print(f"error: {error}", file=sys.stderr)
            return 2


def matrix(comm: Communicator, options: argparse.Namespace) -> int:
    """Compare ways to communicate less."""
    named = [options.jobs, options.methods, options.algorithms, options.layouts, options.links]
    if sum((any(named), options.full, options.quick)) > 1:
        raise ConfigError("--full, --quick and what names values exclude each other; leave two out")
    try:
        wanted = cells.chosen(*named) if any(named) else cells.usual()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if options.full:
        wanted = cells.every()
    extent = Extent(options.steps, options.seconds)
    if options.quick:
        wanted, extent = cells.quick(), Extent(min(options.steps, 12), options.seconds)
    if comm.size == 1:
        raise ConfigError("one rank sends nothing; start it on several, as mpirun -n 2")
    command = f"mpirun -n {comm.size} python -m benchmarks.matrix"
    command = shlex.join([*command.split(), *_said(options, extent)])
    found = run(comm, options.out, wanted, extent, command)
    if comm.rank == 0:
        states = [result.state for result in found.cells.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        print(f"{options.out / 'matrix.html'}: {counts}")
    return 0


def _said(options: argparse.Namespace, extent: Extent) -> list[str]:
    """The options of a matrix, without its folder."""
    found = [f"--steps={extent.steps}", f"--seconds={extent.seconds:g}"]
    for name in ("jobs", "methods", "algorithms", "layouts", "links"):
        if getattr(options, name):
            found += [f"--{name}", *getattr(options, name)]
    return found + [f"--{name}" for name in ("full", "quick") if getattr(options, name)]


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    folder = "folder for results (runs/matrix)"
    add("--out", type=Path, default=Path("runs/matrix"), metavar="FOLDER", help=folder)
    for option, told in (
        ("jobs", "digits gpt"),
        ("methods", "none bf16 int8 powersgd topk dgc sign local diloco delayed, or a codec"),
        ("algorithms", "all-reduces of dense sums, as 'python -m collectives list' has them"),
        ("layouts", "'data' 'pipe x data' 'tensor x data' 'zero 1'"),
        ("links", "'shared memory' '1 Gb/s' '100 Mb/s' '100 ms', or latency=20ms,bandwidth=1Gb/s"),
    ):
        add(f"--{option}", nargs="+", default=[], metavar="NAME", help=told)
    add("--full", action="store_true", help="all combinations: hours")
    add("--quick", action="store_true", help="a few cells of a few steps: a try")
    add("--steps", type=positive, default=160, help="steps of each cell (160)")
    add("--seconds", type=above_zero, default=30.0, help="a cell is stopped after these (30)")


if __name__ == "__main__":
    sys.exit(main())
