"""What the quick tests leave out, and one communicator for a process, closed after each module."""

from pathlib import Path

import pytest
from mpi4py import MPI

from collectives import Communicator


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """What is quick on some numbers of ranks is slow on all others."""
    for item in items:
        for mark in item.iter_markers("quick_on"):
            if MPI.COMM_WORLD.size not in mark.args:
                item.add_marker("slow")


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as communicator:
        yield communicator


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))
