"""Stages 2 and 3: every road of device memory, and work of other streams around its collectives.

In the dry run CuPy's names are those of ``tests/queued_cupy``.
"""

import hashlib
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import names
from tests.gpu.check import Check

ROADS = ("staged", "direct", "ipc")


def begin():
    """CuPy on this rank's GPU, and how many items a large array has; more on a GPU."""
    import cupy

    cupy.cuda.Device(MPI.COMM_WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy, 10_003 if hasattr(cupy, "machine") else (4 << 20) + 3


def place(comm, road, count, dtype):
    """Zeros for a road: by CUDA IPC, memory that all ranks map."""
    import cupy

    return comm.empty(count, dtype, "cupy") if road == "ipc" else cupy.zeros(count, dtype)


def communicator(road):
    """One of its own; the stand-in hears of its messages."""
    import cupy

    if not hasattr(cupy, "machine"):
        return Communicator(MPI.COMM_WORLD, device=device(road))
    from tests.queued_cupy import RecordedTransport

    return Communicator(MPI.COMM_WORLD, device=device(road), transport=RecordedTransport)


def device(road):
    """``auto`` for direct on a GPU: MPI may not be able to, and is asked by the probe."""
    import cupy

    if road == "direct":
        return "direct" if hasattr(cupy, "machine") else "auto"
    return "staged"


def total(size, count):
    return size * (np.arange(count) % 50) + size * (size - 1) // 2


def all_reduces(road):
    """All of them, of several lengths and types, in place and not; equal bits on all ranks."""
    cupy, most = begin()
    with communicator(road) as comm:
        kinds = (np.int32, np.float16, np.float32, np.float64, np.complex64)
        cases = [(1, np.float32), (most, np.float32), *((comm.size + 1, kind) for kind in kinds)]
        ran = [*names("allreduce"), "auto"]
        for count, dtype in cases:
            items, apart = (place(comm, road, count, dtype) for _ in range(2))
            for algorithm in ran if dtype is np.float32 else ("ring", "auto"):
                for result in (items,) if count == most else (apart, items):
                    items[...] = (cupy.arange(count) % 50 + comm.rank).astype(dtype)
                    given = MPI.IN_PLACE if result is items else items
                    comm.Allreduce(given, result, algorithm=algorithm)
                    right = total(comm.size, count).astype(dtype)
                    assert np.array_equal(result.get(), right), algorithm
        items = place(comm, road, 10_001, np.float32)
        for algorithm in ran:
            items.set(np.random.default_rng(comm.rank).random(10_001, np.float32))
            comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
            digests = comm.allgather(hashlib.blake2b(items.get().tobytes()).digest())
            assert len(set(digests)) == 1, f"{algorithm}: ranks have different bits"
        took = comm._engine.resources.devices.way if road != "ipc" else comm.last_plan.reason
    return f"{len(ran)} algorithms; {took}"


def moves(road):
    """All-gather and all-to-all, and a sum of a part of an array."""
    cupy, most = begin()
    with communicator(road) as comm:
        count = most // 8
        mine, everybody, back = (
            place(comm, road, count * n, np.int64) for n in (1, comm.size, comm.size)
        )
        mine[...] = cupy.arange(count) + comm.rank
        wanted = np.concatenate([np.arange(count) + rank for rank in range(comm.size)])
        for algorithm in (*names("allgather"), "auto"):
            everybody[...] = 0
            comm.Allgather(mine, everybody, algorithm=algorithm)
            assert np.array_equal(everybody.get(), wanted), algorithm
        for algorithm in (*names("alltoall"), "auto"):
            back[...] = 0
            comm.Alltoall(everybody, back, algorithm=algorithm)
            right = np.tile(np.arange(count) + comm.rank, comm.size)
            assert np.array_equal(back.get(), right), algorithm
        back[...] = 0
        back[23:-7] = comm.rank
        comm.Allreduce(MPI.IN_PLACE, back[23:-7], algorithm="ring")
        right[...] = comm.size * (comm.size - 1) // 2
        right[:23] = right[-7:] = 0
        assert np.array_equal(back.get(), right), "a part of an array"
    return f"{count} items a block"


def nccl():
    """NCCL among ranks with a GPU each; one rank alone where they share one."""
    cupy, most = begin()
    with communicator("staged") as comm:
        items = (cupy.arange(most) % 50 + comm.rank).astype(np.float32)
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="nccl")
        assert np.array_equal(items.get(), total(comm.size, most).astype(np.float32))
    return f"{comm.size} ranks"


def slow_sums(road, turns):
    """Each turn's verdict: whether this rank has the right sum.

    Work that takes long comes before a call, on a stream of the caller's, and work after it on the
    same stream; what was used is freed at once; the next call is on another stream.
    """
    cupy, _ = begin()
    side = 2000 if not hasattr(cupy, "machine") else 20
    right = []
    with communicator(road) as comm:
        kept = place(comm, road, side * side, np.float32)
        for turn in range(1, turns + 1):
            with cupy.cuda.Stream(non_blocking=True):
                slow = cupy.ones((side, side), np.float32)
                for _ in range(10):
                    slow = slow @ slow
                    slow /= slow.max()
                items = kept if road == "ipc" else slow.reshape(-1).copy()
                items[...] = slow.reshape(-1) * (comm.rank + turn)
                try:
                    comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
                    found = items * 2
                    del slow, items
                    wanted = 2 * (comm.size * turn + comm.size * (comm.size - 1) // 2)
                    right.append(bool(np.allclose(found.get(), wanted)))
                except RuntimeError:  # of the stand-in's, which has seen a fault
                    right.append(False)
        if hasattr(cupy, "machine"):
            right.append(not cupy.machine.races)
    return right


def other_streams(road):
    assert all(right := slow_sums(road, 5)), f"turns: {right}"
    return "5 turns"


def started_plans(road):
    """Two plans under way, started on one stream and awaited on another."""
    cupy, most = begin()
    with communicator(road) as comm:
        arrays = [place(comm, road, most, np.int64) for _ in range(2)]
        plans = [comm.Allreduce_init(MPI.IN_PLACE, each, algorithm="ring") for each in arrays]
        cupy.cuda.get_current_stream().synchronize()
        for turn in range(3):
            with cupy.cuda.Stream(non_blocking=True):
                for factor, (each, plan) in enumerate(zip(arrays, plans), 1):
                    each[...] = (cupy.arange(most) % 50 + comm.rank) * factor
                    plan.Start()
            with cupy.cuda.Stream(non_blocking=True):
                for plan in plans[::-1]:
                    plan.Wait()
                for factor, each in enumerate(arrays, 1):
                    wanted = total(comm.size, most) * factor
                    assert np.array_equal(each.get(), wanted), f"turn {turn}"
    return "3 turns"


CHECKS = [
    *(
        Check(stage, f"{name}, {road}", partial(run, road), (2, 4), 120)
        for stage, name, run in (
            (2, "roads.all-reduce", all_reduces),
            (2, "roads.moves", moves),
            (3, "hazards.streams", other_streams),
            (3, "hazards.plans", started_plans),
        )
        for road in ROADS
    ),
    Check(2, "roads.nccl", nccl, (1,), 120),
]
