"""Memory of GPUs that the ranks map, by the stand-in for CuPy: who waits for whom, who lets go."""

import sys
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import names
from collectives.errors import InvalidBuffer
from collectives.execution.shared import SharedBinder
from tests import standin_cupy

pytestmark = pytest.mark.mpi


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", standin_cupy)
    return standin_cupy


@pytest.fixture
def comm(cupy):
    """One of its own, for what a test does to the stand-in must not last."""
    communicator = Communicator(MPI.COMM_WORLD, device="staged")
    yield communicator
    communicator.close()


def queued(cupy, patch):
    """What is called on device memory from here on happens when somebody synchronizes."""
    queue = []

    def later(function):
        return lambda *given, **named: queue.append(partial(function, *given, **named))

    def synchronize(stream=None):
        work, queue[:] = list(queue), []
        for act in work:
            act()

    patch.setattr(cupy, "copyto", later(np.copyto))
    patch.setattr(cupy, "add", later(np.add), raising=False)
    patch.setattr(cupy._Stream, "synchronize", synchronize)
    return queue, synchronize


def all_reduce_queued(comm, cupy, patch, algorithm):
    """Whether it is right on this rank, if the ranks do what is left in their queues by turns."""
    items = comm.empty(1000, np.int64, "cupy")
    queue, synchronize = queued(cupy, patch)
    queue.append(partial(np.copyto, items, np.arange(1000) + comm.rank))
    comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
    for rank in range(comm.size):
        if comm.rank == rank:
            synchronize()
        MPI.COMM_WORLD.Barrier()
    total = comm.size * np.arange(1000) + comm.size * (comm.size - 1) // 2
    return np.array_equal(items, total)


@pytest.mark.parametrize("algorithm", names("allreduce"))
def test_peers_wait_for_what_is_queued(comm, cupy, monkeypatch, algorithm):
    assert all_reduce_queued(comm, cupy, monkeypatch, algorithm)


@pytest.mark.parametrize("algorithm", ["direct", "ring", "butterfly"])
def test_otherwise_the_result_is_wrong(comm, cupy, monkeypatch, algorithm):
    """As if the binder had forgotten to synchronize before it tells the others."""

    def tick(binder, count):
        return [binder.node.tick(binder.slot, count)]

    monkeypatch.setattr(SharedBinder, "tick", tick)
    right = all_reduce_queued(comm, cupy, monkeypatch, algorithm)
    assert comm.size == 1 or not MPI.COMM_WORLD.allreduce(right, MPI.LAND)


def test_closing_lets_go_of_the_others(comm, cupy):
    before = set(cupy.mapped)
    items = comm.empty(10, np.int64, "cupy")
    assert len(set(cupy.mapped) - before) == comm.size - 1
    comm.close()
    assert set(cupy.mapped) == before
    items[...] = 1  # is still there
    assert int(items.sum()) == 10


@pytest.mark.parametrize("trouble", ["cannot open", "opens something else"])
def test_memory_that_cannot_be_shared(comm, cupy, monkeypatch, caplog, trouble):
    """One rank's trouble is everybody's; the arrays are ordinary ones."""
    if comm.size == 1:
        pytest.skip("nobody to share with")
    if comm.rank == comm.size - 1:
        runtime = cupy.cuda.runtime
        other = cupy.zeros(100, np.uint8)

        def refuse(handle):
            raise RuntimeError("cudaErrorPeerAccessUnsupported")

        if trouble == "cannot open":
            monkeypatch.setattr(runtime, "ipcOpenMemHandle", refuse)
        else:
            monkeypatch.setattr(runtime, "ipcOpenMemHandle", lambda handle: other.data.ptr)
            monkeypatch.setattr(runtime, "ipcCloseMemHandle", lambda address: None)
            other[:8].view(np.int64)[...] = 99
    before = set(cupy.mapped)
    items = comm.empty(10, np.int64, "cupy")
    assert f"rank {comm.size - 1}: " in caplog.text and set(cupy.mapped) == before
    items += comm.rank
    comm.Allreduce(MPI.IN_PLACE, items)
    assert int(items[0]) == comm.size * (comm.size - 1) // 2


def test_what_empty_refuses(comm, monkeypatch):
    with pytest.raises(ValueError, match='memory=\'gpu\' is neither "numpy" nor "cupy"'):
        comm.empty(3, float, "gpu")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InvalidBuffer, match=r"needs CuPy .*pip install 'mpitrain\[cuda13\]'"):
        comm.empty(3, float, "cupy")
