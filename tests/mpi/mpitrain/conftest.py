"""The communicator of the trainer's tests: ranks share the cores, so each has few threads."""

import pytest
from mpi4py import MPI

from collectives import Communicator
from mpitrain.ranks.threads import limit_blas_threads


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as world, limit_blas_threads(world):
        yield world


@pytest.fixture
def alone(comm, folder):
    """Trains the job of a test in one process, for each rank; gives the tests and the module."""
    from tests.mpi.mpitrain.fits import made  # needs torch

    def run(**changed):
        own = str(folder / f"alone{comm.rank}")
        with made(folder, MPI.COMM_SELF, **changed, dir=own) as trainer:
            return trainer.fit(), trainer.module

    return run
