"""The communicator of the trainer's tests: ranks share the cores, so each has few threads."""

import pytest
from mpi4py import MPI

from collectives import Communicator
from mpitrain.ranks.threads import limit_blas_threads


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as world, limit_blas_threads(world):
        yield world
