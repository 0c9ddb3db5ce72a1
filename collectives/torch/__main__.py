"""Runs a script for PyTorch over MPI: ``mpirun -n 4 python -m collectives.torch script.py``."""

import argparse
import os

from collectives.run.program import add_program, run_program


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m collectives.torch",
        description="Runs a script for PyTorch, unchanged, whose process groups are over MPI.",
        usage="mpirun -n RANKS %(prog)s [--explain] (SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    parser.add_argument("--explain", action="store_true", help="print what is changed in torch")
    add_program(parser)
    given = parser.parse_args()
    if not given.module and not os.path.isfile(given.script):
        parser.error(f"there is no file {given.script}")
    try:
        import torch  # noqa: F401
    except ImportError:
        parser.error("PyTorch is not installed; pip install torch brings it")
    from mpi4py import MPI

    from collectives.errors import LaunchError
    from collectives.failure.abort import abort_on_exception
    from collectives.launchers import check_launch
    from collectives.torch.register import take_over

    try:
        check_launch()
    except LaunchError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    changes = take_over() + name_ranks()
    if given.explain and MPI.COMM_WORLD.rank == 0:
        print(*changes, sep="\n", flush=True)
    with abort_on_exception(MPI.COMM_WORLD):
        run_program(given)


def name_ranks() -> list[str]:
    """Sets the variables from which scripts read their rank, as torchrun does."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": node.rank,
        "LOCAL_WORLD_SIZE": node.size,
    }
    node.Free()
    os.environ.update({name: str(value) for name, value in values.items()})
    return [f"{', '.join(values)} are set, as torchrun sets them."]


if __name__ == "__main__":
    main()
