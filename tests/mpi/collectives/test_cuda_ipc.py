"""Memory of GPUs that the ranks map, by the stand-in for CuPy: who waits for whom, who lets go."""

from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import InvalidBuffer
from tests.queued_cupy import RecordedTransport

two_or_more = pytest.mark.mpi(min_size=2)
pytestmark = [pytest.mark.quick_on(3), pytest.mark.parametrize("cupy", [2], indirect=True)]


@pytest.fixture
def comm(cupy):
    """One of its own on the second GPU, for what a test does to the stand-in must not last."""
    cupy.cuda.Device(1).use()
    with Communicator(MPI.COMM_WORLD, device="staged", transport=RecordedTransport) as made:
        yield made


@two_or_more
def test_ranks_ask_for_one_kind_of_memory(comm):
    told = 'rank 0 with memory="cupy", rank 1 with memory="numpy"'
    with pytest.raises(InvalidBuffer, match=told):
        comm.empty(10, np.int64, "numpy" if comm.rank else "cupy")
    assert not comm.empty(10).any()


def test_closing_lets_go_of_the_others(comm, cupy):
    before = set(cupy.queued.shared.mapped)
    items = comm.empty(10, np.int64, "cupy")
    assert len(set(cupy.queued.shared.mapped) - before) == comm.size - 1
    # CUDA would cut smaller ones out of a block, whose whole a handle names.
    assert {size % (2 << 20) for _, size in cupy.queued.shared.allocated.values()} == {0}
    comm.close()
    assert set(cupy.queued.shared.mapped) == before
    items[...] = 1  # is still there
    assert int(items.sum()) == 10


def test_a_stream_may_still_read_the_others_memory_when_the_communicator_closes(comm, cupy):
    comm.empty(100, np.int64, "cupy")
    window = comm._engine.resources.node.windows[0]
    with cupy.cuda.Stream(non_blocking=True):
        copy = window.segment((comm.rank + 1) % comm.size).copy()
    comm.close()
    assert copy.size >= 100 * 8


@two_or_more
@pytest.mark.parametrize("trouble", ["cannot open", "opens something else"])
def test_memory_that_cannot_be_shared(comm, cupy, monkeypatch, caplog, trouble):
    """One rank's trouble is everybody's; the arrays are ordinary ones."""
    if comm.rank == comm.size - 1:
        runtime, other = cupy.cuda.runtime, cupy.zeros(100, np.uint8)
        if trouble == "cannot open":
            refuse = Mock(side_effect=RuntimeError("cudaErrorPeerAccessUnsupported"))
            monkeypatch.setattr(runtime, "ipcOpenMemHandle", refuse)
        else:
            monkeypatch.setattr(runtime, "ipcOpenMemHandle", lambda handle: other.data.ptr)
            monkeypatch.setattr(runtime, "ipcCloseMemHandle", lambda address: None)
            other[:8].view(np.int64)[...] = 99
            cupy.cuda.get_current_stream().synchronize()
    before = set(cupy.queued.shared.mapped)
    items = comm.empty(10, np.int64, "cupy")
    assert f"rank {comm.size - 1}: " in caplog.text and set(cupy.queued.shared.mapped) == before
    items += comm.rank
    comm.Allreduce(MPI.IN_PLACE, items)
    assert int(items[0]) == comm.size * (comm.size - 1) // 2


def test_a_rank_without_a_gpu(comm, cupy, monkeypatch):
    """All ranks are told, and go on."""
    last = comm.size - 1
    none = cupy.cuda.runtime.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device")
    with monkeypatch.context() as patch:
        if comm.rank == last:
            patch.setattr(cupy.cuda, "Device", Mock(side_effect=none))
        with pytest.raises(InvalidBuffer, match=f"rank {last}: .*cudaErrorNoDevice"):
            comm.empty(3, float, "cupy")
    assert comm.allreduce(1) == comm.size
