"""The command line: ``mpirun -n 4 python -m mpitrain train job.toml``."""

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from mpi4py import MPI

from collectives import Communicator, LaunchError, UnknownAlgorithm
from collectives.launch import abort_on_exception, check_launch
from mpitrain.config import Config, ConfigError, load
from mpitrain.data import DataError
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.threads import limit_blas_threads
from mpitrain.trainer import Trainer
from mpitrain.update import NonFinite


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command on all ranks.

    Returns:
        The exit code: 0; 1 for training that went wrong; 2 for a job that cannot be run.  These
        two are what all ranks find out together; any other error aborts.
    """
    with Communicator(MPI.COMM_WORLD) as comm:
        options = parse(arguments, speak=comm.rank == 0)
        with abort_on_exception(comm):
            try:
                check_launch(comm.size)
                config = load_once(comm, options)
                with limit_blas_threads(comm), Trainer(comm, config) as trainer:
                    trainer.train()
            except (ConfigError, DataError, LaunchError, UnknownAlgorithm) as error:
                return complain(comm, error, 2)
            except (NonFinite, ReplicaMismatch) as error:
                return complain(comm, error, 1)
    return 0


def complain(comm: MPI.Intracomm, error: Exception, status: int) -> int:
    """Print an error that all ranks have raised, once; returns ``status``."""
    if comm.rank == 0:
        print(f"mpitrain: {error}", file=sys.stderr)
    return status


def load_once(comm: MPI.Intracomm, options: argparse.Namespace) -> Config:
    """Read the job on rank 0 alone, so that all ranks have the same job or the same error."""
    outcome: Config | ConfigError | None = None
    if comm.rank == 0:
        try:
            outcome = load(options.config, options.set)
        except ConfigError as error:
            outcome = error
    agreed: Config | ConfigError = comm.bcast(outcome)
    if isinstance(agreed, ConfigError):
        raise agreed
    return agreed


def parse(arguments: Sequence[str] | None, *, speak: bool) -> argparse.Namespace:
    """The options; only the rank that may ``speak`` prints help and complaints."""
    parser = argparse.ArgumentParser(
        prog="mpitrain",
        description="Distributed training on MPI.  Start it with mpirun or srun, one process a "
        "rank; without a launcher it runs as a single rank.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train the model of a job file",
        description="Train the model of a job file (TOML) on all ranks, data parallel.  Each step "
        "is written to metrics.jsonl in the job's run.dir.",
        epilog="example: mpirun -n 4 python -m mpitrain train jobs/examples/digits.toml "
        "--set parallel.algorithm=ring",
    )
    train.add_argument("config", type=Path, metavar="CONFIG", help="the job file")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="replace a value of the job file, as in optim.lr=0.1 or model.hidden=[128,64]; may "
        "be given several times",
    )
    unheard = io.StringIO()
    with (
        redirect_stdout(sys.stdout if speak else unheard),
        redirect_stderr(sys.stderr if speak else unheard),
    ):
        return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
