"""One communicator for the tests of a process, closed at the end of each module."""

from pathlib import Path

import pytest
from mpi4py import MPI

from collectives import Communicator


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as communicator:
        yield communicator


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))
