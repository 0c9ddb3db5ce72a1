"""Runs a script for PyTorch over MPI: ``mpirun -n 4 python -m collectives.torch script.py``."""

import argparse
import os
import sys

from collectives.about import load_mpi_or_exit
from collectives.run.program import parse, run_program


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m collectives.torch",
        description="Runs a script for PyTorch, unchanged, whose process groups are over MPI.",
        usage="mpirun -n RANKS %(prog)s [--replace NAMES] [--profile[=FILE]] [--explain] "
        "(SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    parser.add_argument("--explain", action="store_true", help="print what is changed in torch")
    names = 'give the script "mpi" for the backends that it names so, as gloo or gloo,nccl'
    parser.add_argument("--replace", metavar="NAMES", default="", help=names)
    given = parse(parser, sys.argv[1:], ["--replace"])
    try:
        import torch  # noqa: F401
    except ImportError:
        parser.error("PyTorch is not installed; pip install torch brings it")
    load_mpi_or_exit(parser)
    from mpi4py import MPI

    from collectives.errors import LaunchError
    from collectives.failure.abort import abort_on_exception
    from collectives.launchers import check_launch
    from collectives.torch.register import take_over, tell_of_others

    replaced = tuple(given.replace.lower().split(",")) if given.replace else ()
    try:
        check_launch()
        changes = take_over(replaced) + name_ranks()
    except (LaunchError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    before, words = parser.prog, f"{'-m ' * given.module}{given.script}"
    tell_of_others(lambda name: f"{before} --replace {','.join((name, *replaced))} {words}")
    if given.profile:
        from collectives.torch.profile import profile

        profile(given.profile)
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
