"""Which road device memory takes, whose GPU it is, and whose library's."""

import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import InvalidBuffer
from collectives.execution.memory import is_on_device
from tests.gpu.roads import total

two_gpus = pytest.mark.parametrize("cupy", [2], indirect=True)
pytestmark = [pytest.mark.quick_on(3), two_gpus]


def expect_sum(cupy, comm, algorithm="ring"):
    items = cupy.arange(20) + comm.rank
    comm.Allreduce(MPI.IN_PLACE, [items, MPI.INT64_T], algorithm=algorithm)
    assert np.array_equal(items.get(), total(comm.size, 20))


@pytest.mark.parametrize("works", [True, False])
def test_the_probe_is_asked_once(cupy, monkeypatch, works):
    """By the node's first rank; communicators that are made of this one know."""
    asked = []

    def probe(*gpus):
        asked.append(gpus)
        return works, "as it was seen"

    monkeypatch.setattr("collectives.execution.transport.cuda_probe.probe", probe)
    comm = Communicator(MPI.COMM_WORLD, device="auto")
    for gpu in (1, 0):  # on other GPUs, too
        cupy.cuda.Device(gpu).use()
        expect_sum(cupy, comm)
    other = comm.Dup()
    half = other.Split(comm.rank % 2, comm.rank)
    for each in (other, half):
        expect_sum(cupy, each)
        assert each._engine.settings.device == ("direct" if works else "staged")
    assert asked == ([(1, 1)[: comm.size]] if comm.rank == 0 else [])
    # The MPI library's own collectives may have what is known to work, too.
    refuses = pytest.raises(InvalidBuffer, match="which must be CUDA-aware")
    with nullcontext() if works else refuses:
        expect_sum(cupy, comm, "native")
    for each in (half, other):
        each.Free()
    comm.close()


def test_the_second_call_of_a_loop_is_not_read(cupy, monkeypatch):
    """And memory of another GPU, type or length is."""
    with Communicator(MPI.COMM_WORLD, device="staged") as comm:
        items = cupy.arange(40) + comm.rank
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
        plan, wanted = comm.last_plan, total(comm.size, 40)
        with monkeypatch.context() as patch:
            patch.setattr("collectives.calls.validate.parse_call", None)
            for _ in range(2):
                comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
                wanted = wanted * comm.size
                assert comm.last_plan is plan and np.array_equal(items.get(), wanted)
        comm.Allreduce(MPI.IN_PLACE, items[:20], algorithm="ring")
        assert comm.last_plan is not plan
        comm.Allreduce(MPI.IN_PLACE, items.view(np.uint64), algorithm="ring")
        wanted[:20] *= comm.size
        assert np.array_equal(items.get(), wanted * comm.size)


def test_buffers_on_two_gpus(cupy):
    with Communicator(MPI.COMM_WORLD, device="staged") as comm:
        items = cupy.zeros(3)
        with cupy.cuda.Device(1):
            result = cupy.zeros(3)
        with pytest.raises(InvalidBuffer, match="lies on a GPU, the other on another one"):
            comm.Allreduce(items, result)
        with pytest.raises(InvalidBuffer, match="lies on a GPU, the other does not"):
            comm.Allreduce(items, np.zeros(3), algorithm="ring")


@pytest.fixture
def torch(cupy, monkeypatch):
    """A few names of PyTorch, with a current stream of its own on GPU 1."""
    library = ModuleType("torch")
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)

    class Tensor:
        is_cuda, is_cpu, dtype = True, False, "torch.float32"

        def __init__(self, items, requires_grad=False):
            self.items, self.requires_grad = items, requires_grad

        def detach(self):
            return Tensor(self.items)

        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")

        def __dlpack_device__(self):
            return 2, self.items.device.id

        def __dlpack__(self, stream=None):
            if self.requires_grad:
                raise BufferError("Can't export tensors that require gradient")
            machine = cupy.machine
            gpu = cupy.cuda.runtime.getDevice()
            asks = machine.null[gpu] if stream == 1 else machine.streams[stream]
            machine.wait(asks, library.stream.queue().last)
            return self.items._a

    library.Tensor, library.stream = Tensor, stream
    library.cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda gpu: SimpleNamespace(cuda_stream=stream.ptr if gpu else 0),
    )
    monkeypatch.setitem(sys.modules, "torch", library)
    return library


@pytest.mark.parametrize("form", ["blocking", "plan"])
def test_tensors_in_the_order_of_their_library(cupy, torch, form):
    """Though the current GPU is another one, and gradients are recorded."""
    with Communicator(MPI.COMM_WORLD, device="staged") as comm:
        with cupy.cuda.Device(1), torch.stream:
            items = cupy.arange(50) + comm.rank
        tensor = torch.Tensor(items, requires_grad=True)
        assert is_on_device(tensor)
        if form == "plan":
            call = comm.Allreduce_init(MPI.IN_PLACE, tensor, algorithm="ring")
        else:
            call = partial(comm.Allreduce, MPI.IN_PLACE, tensor, algorithm="ring")
        with cupy.cuda.Device(1), torch.stream:
            items += 1
        call()
        with cupy.cuda.Device(1), torch.stream:
            found = items.get()
        assert np.array_equal(found, total(comm.size, 50) + comm.size)
