"""``mpitrain matrix``: ways to communicate less, side by side."""

import argparse
import shlex

from collectives import Communicator
from mpitrain.bench import cells
from mpitrain.bench.matrix import Extent, run
from mpitrain.config import ConfigError


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
    command = f"mpirun -n {comm.size} python -m mpitrain matrix"
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
