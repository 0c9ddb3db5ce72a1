"""Print the table of docs/huggingface.md: models of transformers in each layout on these ranks.

    mpiexec -n 2 python -m tests.mpi.mpitrain.transformers_table [a layout ...]

A cell is the largest relative difference of a loss from that of one process, in float64, with
padding, labels of -100 and all dropouts on; or the sentence that refuses the layout.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from mpi4py import MPI

from mpitrain.config import ConfigError
from tests.mpi.mpitrain.test_transformers import LAYOUTS, MODELS, in_one_process, losses


def cell(name: str, layout: str) -> str:
    """The text of a cell; collective."""
    world = MPI.COMM_WORLD
    with TemporaryDirectory() as own:
        try:
            found = losses(Path(world.bcast(own)), name, layout)
        except ConfigError as error:
            return str(error)
        finally:
            world.Barrier()  # the first rank's folder is in use
    return f"{np.abs(np.divide(found, in_one_process(name)) - 1).max():.0e}"


def main(layouts: list[str]) -> None:
    """Print a row for each model; collective."""
    is_first = MPI.COMM_WORLD.rank == 0
    if is_first:
        print("| ranks | model |", " | ".join(layouts), "|")
        print("| --- | --- |", " | ".join("---" for _ in layouts), "|")
    for name in MODELS:
        cells = [cell(name, layout) for layout in layouts]
        if is_first:
            print(f"| {MPI.COMM_WORLD.size} | {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(LAYOUTS))
