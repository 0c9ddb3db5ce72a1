"""A collective in MPI's three forms, buffers in some, and sums that say whether all is well."""

import os
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError, Communicator
from collectives.calls.choice import Entry, Rule, Table
from collectives.calls.native import library

P, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
LAST, LEFT, RIGHT = P - 1, (RANK - 1) % P, (RANK + 1) % P
#: Ways to make a call; ``None``, the plain one, as ``blocking``.
FORMS = ("blocking", "nonblocking", "persistent")
#: Methods that are not called as their collective.
METHODS = {"reduce_scatter": "Reduce_scatter_block", "broadcast": "Bcast"}


def run(comm, form, name, *given, **how):
    """Makes a call in one of these forms; returns the plan of a nonblocking one."""
    if form == "blocking":
        return getattr(comm, name)(*given, **how)
    if form == "nonblocking":
        request = getattr(comm, f"I{name.lower()}")(*given, **how)
        request.Wait()
        return request
    plan = getattr(comm, f"{name}_init")(*given, **how)
    plan.Start()
    plan.Wait()
    plan.Free()


class Exported:
    """Memory by DLPack alone."""

    def __init__(self, items):
        self.items = items

    def __dlpack__(self, **options):
        return self.items.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.items.__dlpack_device__()


class Interface:
    """Host memory by CUDA's array interface, as NumPy's own has it."""

    def __init__(self, items):
        self.items = items
        self.__cuda_array_interface__ = items.__array_interface__


def by_address(items):
    return MPI.buffer.fromaddress(MPI.Get_address(items), items.nbytes)


def tensor_of(items):
    """torch's tensor on an array of one of ml_dtypes' types."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
    integers = items.view(np.int16 if items.itemsize == 2 else np.uint8)
    return torch.from_numpy(integers).view(getattr(torch, items.dtype.name))


def total(comm):
    return comm.size * (comm.size - 1) // 2


def expect_sum(comm, items, algorithm=None, plus=0, form="blocking"):
    """The sum in place of ranks, each ``plus`` so many, is right."""
    items[...] = comm.rank + plus
    run(comm, form, "Allreduce", MPI.IN_PLACE, items, algorithm=algorithm)
    assert (items == total(comm) + plus * comm.size).all()


def refused_in_child(calls):
    """How many of the calls raise in a process that this rank forks, as it is no rank."""
    refused = 0
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for call in calls:
        with suppress(Exception):
            try:
                call()
            except CollectiveError as error:
                refused += "was forked by a rank" in str(error)
    os._exit(refused)


def tuned(folder, *told, per_node=None):
    """The file of a table: for all-reduces in a kind of memory, an algorithm from some bytes on."""
    size, path = MPI.COMM_WORLD.size, folder / "tuned.json"
    entries = [
        Entry(library(), "allreduce", memory, size, per_node or size, [Rule(start, algorithm, 2.0)])
        for memory, algorithm, start in told
    ]
    path.write_bytes(msgspec.json.encode(Table(1, {}, 1.0, 10.0, entries)))
    return path


def fresh():
    """A communicator of a test's own: ``comm = pytest.fixture(fresh)``."""
    with Communicator(MPI.COMM_WORLD) as made:
        yield made


def expect_well(comm, algorithm="ring"):
    """The communicator's ranks are where they were, and nothing is left behind."""
    expect_sum(comm, np.zeros(100), algorithm)
