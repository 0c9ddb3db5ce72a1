"""One communicator for the tests of a process, closed at the end of each module."""

import pytest
from mpi4py import MPI

from collectives import Communicator


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as communicator:
        yield communicator
