"""On ranks, what a fault in the order of a GPU's work would spoil: each says whether all was right.

Each rank has two GPUs, of which the second one is used.
"""

import ctypes

import numpy as np
from mpi4py import MPI

from collectives.bench.device import ByTheHost
from collectives.calls.arguments import Arguments
from collectives.communicator import Communicator
from collectives.errors import CollectiveError
from tests import queued_cupy
from tests.queued_cupy import Machine, RecordedTransport

COUNT = 100


def _cupy(patch, seed):
    machine = Machine(devices=2, seed=seed)
    # Of a scenario that a fault has ended, MPI may still receive messages into the memory.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(machine))
    cupy = queued_cupy.install(patch, machine)
    cupy.cuda.Device(1).use()
    return cupy


def _comm(device="direct"):
    return Communicator(MPI.COMM_WORLD, device=device, transport=RecordedTransport)


def _total(size):
    return size * np.arange(COUNT) + size * (size - 1) // 2


def _sum(cupy, comm, algorithm, items=None):
    """Whether a sum is right of what a stream of the caller's still writes."""
    with cupy.cuda.Stream(non_blocking=True):
        items = cupy.zeros(COUNT, np.int64) if items is None else items
        items[...] = cupy.arange(COUNT) + comm.rank
        comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
        found = items.get()
    return np.array_equal(found, _total(comm.size)) and not cupy.machine.races


def direct(patch, seed):
    """Blocking, on memory that MPI takes."""
    cupy = _cupy(patch, seed)
    with _comm() as comm:
        return _sum(cupy, comm, "ring")


def ipc(patch, seed):
    """On memory that the ranks map: of zeros first."""
    cupy = _cupy(patch, seed)
    with _comm() as comm:
        items = comm.empty(COUNT, np.int64, "cupy")
        is_shared = bool(comm._engine.resources.node.windows.in_use())
        zeros = not items.get().any()
        right = [_sum(cupy, comm, algorithm, items) for algorithm in ("direct", "ring")]
        MPI.COMM_WORLD.Barrier()
        return is_shared and zeros and all(right)


def close(patch, seed):
    """A stream of the caller's still reads another rank's memory when the communicator closes."""
    cupy = _cupy(patch, seed)
    comm = _comm()
    comm.empty(COUNT, np.int64, "cupy")
    window = comm._engine.resources.node.windows[0]
    with cupy.cuda.Stream(non_blocking=True):
        copy = window.segment((comm.rank + 1) % comm.size).copy()
    comm.close()
    is_let_go = not cupy.queued.shared.mapped
    return copy.size >= COUNT * 8 and is_let_go and not cupy.machine.races


def by_the_host(patch, seed):
    """The benchmark's row of the MPI library."""
    cupy = _cupy(patch, seed)
    with _comm("staged") as comm:
        items, result = cupy.arange(COUNT) + comm.rank, cupy.zeros(COUNT, np.int64)
        spec = Arguments("allreduce", [items, MPI.INT64_T], [result, MPI.INT64_T], MPI.SUM)
        row = ByTheHost(comm, spec)
        row()
        return np.array_equal(result.get(), _total(comm.size))


def native(patch, seed):
    """The MPI library's own, blocking and not, where it is known to take device memory."""
    cupy = _cupy(patch, seed)
    with Communicator(MPI.COMM_WORLD, device="direct") as comm:
        items = cupy.arange(COUNT) + comm.rank
        right = True
        for start in (comm.Allreduce, comm.Iallreduce):
            result = cupy.zeros(COUNT, np.int64)
            request = start([items, MPI.INT64_T], [result, MPI.INT64_T], algorithm="native")
            if request is not None:
                request.Wait()
            right = right and np.array_equal(result.get(), _total(comm.size))
    return right


def refused(patch, seed):
    """The same where it is not."""
    cupy = _cupy(patch, seed)
    with Communicator(MPI.COMM_WORLD, device="staged") as comm:
        items, told = cupy.zeros(COUNT, np.int64), []
        for start in (comm.Allreduce, comm.Iallreduce, comm.Allreduce_init):
            try:
                start(MPI.IN_PLACE, [items, MPI.INT64_T], algorithm="native")
            except CollectiveError as error:
                told.append(str(error))
    return len(told) == 3 and all("COLLECTIVES_DEVICE=direct" in text for text in told)


def other_gpu(patch, seed):
    """Arrays on a GPU that is not the current one."""
    cupy = _cupy(patch, seed)
    with _comm() as comm:
        with cupy.cuda.Device(0):
            items = cupy.arange(COUNT) + comm.rank
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
        plan = comm.Allreduce_init(MPI.IN_PLACE, items)
        plan.Start()
        plan.Wait()
        with cupy.cuda.Device(0):
            return np.array_equal(items.get(), comm.size * _total(comm.size))


def nccl(patch, seed):
    """All that NCCL has, of what a stream of the caller's still writes."""
    cupy = _cupy(patch, seed)
    with _comm() as comm:
        return _sum(cupy, comm, "nccl") and not cupy.machine.races
