"""Tests that quick runs leave out, and a communicator that is closed after each module."""

import os
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from collectives import Communicator


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Marks all tests here as MPI's, and some as slow or skipped, by the number of ranks.

    Tests that are quick on some numbers of ranks are slow on all others, and sweeps whose cases
    depend little on the number end at some number.
    """
    size, here = MPI.COMM_WORLD.size, Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("mpi")
        for mark in item.iter_markers("at_most"):
            if size > mark.args[0]:
                item.add_marker(pytest.mark.skip(reason=f"sweeps on at most {mark.args[0]} ranks"))
        for mark in item.iter_markers("quick_on"):
            if size not in mark.args:
                item.add_marker("slow")


@pytest.fixture(autouse=True)
def scratch():
    """Ranks, which start no launcher, keep the TMPDIR that they have in common."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Failures on a rank are printed at once: others may wait in the test for ever."""
    report = yield
    if report.failed and MPI.COMM_WORLD.size > 1:
        text = f"rank {MPI.COMM_WORLD.rank}: {item.nodeid} failed:\n{report.longreprtext}\n"
        print(text, file=sys.__stderr__, flush=True)
    return report


@pytest.fixture(scope="session", autouse=True)
def unsynchronised():
    """Files need not reach the disk: no test pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as communicator:
        yield communicator


@pytest.fixture(scope="module")
def world():
    """torch's group of all ranks, over our backend."""
    import torch.distributed as dist

    from collectives.torch.register import register

    register()
    dist.init_process_group("collectives", "mpi://")
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def group(world):
    """A group of all ranks of the test's own, whose memory no other test has."""
    import torch.distributed as dist

    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


@pytest.fixture
def split_off(monkeypatch):
    """The communicators that are split off in a test, and not freed yet."""
    there = []
    split, free = Communicator.Split, Communicator.Free

    def noted(self, *args):
        there.append(split(self, *args))
        return there[-1]

    def freed(self):
        if self in there:
            there.remove(self)
        free(self)

    monkeypatch.setattr(Communicator, "Split", noted)
    monkeypatch.setattr(Communicator, "Free", freed)
    return there


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))
