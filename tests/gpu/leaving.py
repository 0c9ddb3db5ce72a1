"""Stage 8: what communicators and jobs leave behind on a GPU: nothing."""

import gc
import os
import signal
from functools import partial

import numpy as np
from mpi4py import MPI

from tests.gpu.check import Check
from tests.gpu.roads import ROADS, begin, communicator, place, total


def in_use(cupy):
    """Bytes of device memory that this rank's arrays have; allocations, of the stand-in."""
    gc.collect()
    if hasattr(cupy, "machine"):
        return cupy.machine.in_use
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return cupy.get_default_memory_pool().used_bytes()


def use(cupy, road, count):
    """A communicator from its beginning to its end, with a sum and a plan."""
    with communicator(road) as comm:
        items = place(comm, road, count, np.int64)
        items[...] = cupy.arange(count) % 50 + comm.rank
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
        assert np.array_equal(items.get(), total(comm.size, count)), f"{count} items"
        plan = comm.Allreduce_init(MPI.IN_PLACE, items, algorithm="butterfly")
        plan.Start()
        plan.Wait()
        wanted = total(comm.size, count) * comm.size
        assert np.array_equal(items.get(), wanted), f"{count} items, the plan"


def nothing_left(road):
    """Memory after each of several communicators is what it was after the first."""
    cupy, most = begin()
    left = []
    for turn in range(4):
        use(cupy, road, most + turn)
        MPI.COMM_WORLD.Barrier()
        left.append(in_use(cupy))
    assert len(set(left)) == 1, f"in use after each communicator: {left}"
    return f"in use after each of 4 communicators: {left[0]}"


def other_memory_at_once(road):
    """Pools are emptied between the calls of one communicator: addresses come again, and what a
    library still knows of them is out of date."""
    cupy, most = begin()
    with communicator(road) as comm:
        for turn in range(6):
            count = most // (1 + turn % 3)
            items = cupy.arange(count) % 50 + comm.rank
            comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
            assert np.array_equal(items.get(), total(comm.size, count)), f"turn {turn}"
            del items
            in_use(cupy)
    return "6 turns"


def killed():
    """The last rank is killed in the middle of its calls; the others must not go on for ever."""
    cupy, most = begin()
    with communicator("staged") as comm:
        items = cupy.zeros(most, np.float32)
        for turn in range(1000):
            if turn == 3 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
    return "the others went on"


CHECKS = [
    *(
        Check(8, f"leaving.memory, {road}", partial(nothing_left, road), (2,), 120)
        for road in ROADS
    ),
    *(
        Check(8, f"leaving.pools, {road}", partial(other_memory_at_once, road), (2,), 120)
        for road in ROADS
        if road != "ipc"  # whose memory is in no pool
    ),
    Check(8, "leaving.killed", killed, (2, 4), 60, is_killed=True),
]
