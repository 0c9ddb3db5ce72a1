"""``tune`` measures the table by which ``algorithm="auto"`` chooses."""

import argparse
from pathlib import Path

from collectives.about import load_mpi
from collectives.calls.tables import users
from collectives.commands.arguments import add_collective, add_sizes, positive
from collectives.commands.program import Commands, add_verbose, refuse, show_log
from collectives.errors import CollectiveError


def add(commands: Commands) -> None:
    """Adds ``tune``."""
    tuning = commands.add_parser("tune", help="measure under mpirun what 'auto' should choose")
    add = tuning.add_argument
    add_collective(tuning)
    add_sizes(add, "16M", 2)
    add("--repeats", type=positive, default=5, help="repeats in each pass (5)")
    passes = "passes over all sizes; ours is taken where it is faster in 3 of 4 repeats (2)"
    add("--passes", type=positive, default=2, help=passes)
    table = "table to write; an existing one is updated (this user's, which all programs find)"
    add("-o", "--output", type=Path, default=users(), help=table)
    add_verbose(tuning)
    tuning.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures a tuning table."""
    load_mpi()
    from mpi4py import MPI

    from collectives.bench import inputs
    from collectives.bench.tune import known_entries, tune
    from collectives.communicator import Communicator
    from collectives.failure.abort import abort_on_exception

    comm = Communicator(MPI.COMM_WORLD)
    show_log(options, comm.rank)
    with abort_on_exception(comm):
        try:
            lengths = inputs.sizes(options.minbytes, options.maxbytes, options.stepfactor, None)
            sizes, known = list(lengths), known_entries(comm, options.output)
            if comm.size == 1:
                raise CollectiveError(
                    "tune measures what several ranks do together; start it as mpirun -n 4 python "
                    "-m collectives tune"
                )
        except (CollectiveError, ValueError) as error:  # raised on all ranks
            return refuse(comm.rank, error)
        why = tune(comm, options, sizes, known)
        return refuse(comm.rank, why) if why else 0
