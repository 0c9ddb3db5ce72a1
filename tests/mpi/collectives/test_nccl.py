"""``algorithm="nccl"``: what it computes, what it refuses, and when ``auto`` takes it; NCCL's calls
are MPI's here."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import CollectiveError, UnknownAlgorithm
from tests.gpu.roads import total
from tests.mpi.collectives.forms import tuned

pytestmark = pytest.mark.quick_on(3)


@pytest.fixture
def comm(cupy):
    with Communicator(MPI.COMM_WORLD, device="staged") as communicator:
        yield communicator


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float16])
def test_all_reduce(comm, cupy, in_place, dtype):
    mine = (cupy.arange(50) + comm.rank).astype(dtype)
    result = mine if in_place else cupy.zeros(50, dtype)
    comm.Allreduce(MPI.IN_PLACE if in_place else mine, result, algorithm="nccl")
    assert comm.last_plan.algorithm == "nccl" and comm.last_plan.reason == "asked for"
    assert np.array_equal(result.get(), total(comm.size, 50).astype(dtype))


def test_the_other_collectives(comm, cupy):
    size, rank, root = comm.size, comm.rank, comm.size - 1
    mine, parts = cupy.arange(6) + rank, cupy.arange(6 * size) + rank
    out, wanted = cupy.zeros(6, np.int64), total(size, 6 * size)[6 * rank :][:6]
    comm.Reduce_scatter_block(parts, out, algorithm="nccl")
    assert np.array_equal(out.get(), wanted)
    comm.Reduce_scatter_block(MPI.IN_PLACE, parts, algorithm="nccl")
    assert np.array_equal(parts[:6].get(), wanted)
    wanted = np.concatenate([np.arange(6) + other for other in range(size)])
    everybody = cupy.zeros(6 * size, np.int64)
    comm.Allgather(mine, everybody, algorithm="nccl")
    assert np.array_equal(everybody.get(), wanted)
    everybody[...] = 0
    everybody[6 * rank : 6 * rank + 6] = mine
    comm.Allgather(MPI.IN_PLACE, everybody, algorithm="nccl")
    assert np.array_equal(everybody.get(), wanted)
    comm.Bcast(mine, root, algorithm="nccl")
    assert np.array_equal(mine.get(), np.arange(6) + root)
    comm.Reduce(cupy.arange(6) + rank, out if rank == root else None, root=root, algorithm="nccl")
    if rank == root:
        assert np.array_equal(out.get(), total(size, 6))
    # Items that NCCL has no type for are moved all the same.
    comm.Bcast(cupy.zeros(3, np.complex64), 0, algorithm="nccl")


def test_a_plan_keeps_its_arrays_and_its_order(comm, cupy):
    """Started on one stream, awaited on another."""
    items = cupy.arange(50) + comm.rank
    plan = comm.Allreduce_init(MPI.IN_PLACE, items, algorithm="nccl")
    cupy.cuda.get_current_stream().synchronize()
    own = np.arange(50) + comm.rank
    for _ in range(3):
        with cupy.cuda.Stream(non_blocking=True):
            items[...] = cupy.asarray(own)
            plan.Start()
        with cupy.cuda.Stream(non_blocking=True):
            plan.Wait()
            assert np.array_equal(items.get(), total(comm.size, 50))
    plan.Free()


@pytest.mark.parametrize("form", ["asks", "waits for the kernel"])
def test_a_rank_waits_for_an_earlier_plan_before_it_starts(comm, cupy, form):
    """All start them in one order; the first rank's kernel must not hold up its messages."""
    first, second = (cupy.arange(50) + comm.rank for _ in range(2))
    plan = comm.Allreduce_init(MPI.IN_PLACE, first, algorithm="ring")
    kernel = comm.Allreduce_init(MPI.IN_PLACE, second, algorithm="nccl")
    plan.Start()
    if comm.rank == 0:
        kernel.Start()
    if form == "asks":
        arrives = any(plan.Test() for _ in range(20_000))  # for ever, if it were held up
    elif comm.rank == 0:
        kernel.synchronize()
    else:
        plan.Wait()
    if comm.rank > 0:
        kernel.Start()
    for one, items in ((plan, first), (kernel, second)):
        one.Wait()
        assert np.array_equal(items.get(), total(comm.size, 50))
    assert form != "asks" or arrives


def test_what_it_refuses(comm, cupy):
    with pytest.raises(UnknownAlgorithm, match="are for arrays on a GPU"):
        comm.Allreduce(MPI.IN_PLACE, np.zeros(3), algorithm="nccl")
    items = cupy.zeros(3 * comm.size)
    with pytest.raises(UnknownAlgorithm, match="NCCL has no alltoall"):
        comm.Alltoall(items, cupy.zeros(3 * comm.size), algorithm="nccl")
    for op, dtype in ((MPI.BAND, np.int32), (MPI.SUM, np.complex64), (MPI.LAND, np.int64)):
        with pytest.raises(UnknownAlgorithm, match=f"no {np.dtype(dtype).name} by this operation"):
            comm.Allreduce(MPI.IN_PLACE, items.astype(dtype), op, algorithm="nccl")
    with pytest.raises(UnknownAlgorithm, match="nccl has no options"):
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="nccl:trees=2")
    with pytest.raises(UnknownAlgorithm, match="not for a whole communicator"):
        Communicator(MPI.COMM_WORLD, algorithm="nccl")


@pytest.mark.mpi(min_size=2)
def test_two_ranks_on_one_gpu(comm, cupy, monkeypatch):
    monkeypatch.setattr(cupy.cuda.Device, "pci_bus_id", "0000:01:00.0")
    for _ in range(2):
        with pytest.raises(CollectiveError, match="NCCL needs a GPU for each rank, and"):
            comm.Allreduce(MPI.IN_PLACE, cupy.zeros(3), algorithm="nccl")
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shared_gpu", [False, True])
def test_auto_goes_by_a_measured_table(cupy, tmp_path, monkeypatch, shared_gpu):
    """And by what there is; without a table it is never taken."""
    if shared_gpu:
        monkeypatch.setattr(cupy.cuda.Device, "pci_bus_id", "0000:01:00.0")
    world, table = MPI.COMM_WORLD, tuned(tmp_path, ("cupy", "nccl", 0))
    items = cupy.arange(50) + world.rank
    with Communicator(world, device="staged", tuning=table) as comm:
        comm.Allreduce(MPI.IN_PLACE, items)
        assert comm.last_plan.algorithm == ("butterfly" if shared_gpu else "nccl")
        assert np.array_equal(items.get(), total(comm.size, 50))
        # A call that it cannot do goes another way.
        comm.Allreduce(MPI.IN_PLACE, cupy.zeros(5, np.int32), MPI.BAND)
        assert comm.last_plan.algorithm != "nccl"
    with Communicator(world, device="staged") as comm:
        comm.Allreduce(MPI.IN_PLACE, items)
        assert comm.last_plan.algorithm != "nccl"
