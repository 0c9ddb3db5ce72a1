"""Buffers of a pool: whose turn it is, what is computed in them, when they are taken back."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, InvalidBuffer, SharedPool
from tests.mpi.collectives.forms import expect_sum, fresh

pytestmark = pytest.mark.quick_on(1, 2, 3)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


comm = pytest.fixture(fresh)


def address(array: np.ndarray) -> int:
    return MPI.Get_address(array)


def is_shared(comm: Communicator, array: np.ndarray) -> bool:
    """Whether all ranks' arrays lie where a collective meets no ordinary memory."""
    node = comm._engine.resources.node
    there = node is not None and node.locate(address(array), array.nbytes) is not None
    return MPI.COMM_WORLD.allreduce(there, MPI.LAND)


@pytest.mark.parametrize("items", [1, 1000, 300_000])
def test_gathers_and_sums_in_arrays_of_a_pool(comm, items):
    pool = SharedPool(comm)
    mine = np.random.default_rng(RANK).standard_normal(items)
    every = np.stack([np.random.default_rng(r).standard_normal(items) for r in range(SIZE)])
    for _ in range(5):
        whole = pool.take((SIZE, items), np.float64)
        total = pool.take(items, np.float64)
        assert is_shared(comm, whole) and is_shared(comm, total)
        comm.Allgather(mine, whole, algorithm="direct")
        comm.Allreduce(mine, total, algorithm="direct")
        assert np.array_equal(whole, every)
        assert np.allclose(total, every.sum(0), rtol=1e-12, atol=1e-12)
        del whole, total


def test_a_ring_of_two_goes_round(comm):
    pool = SharedPool(comm)
    seen = [address(pool.take(1000)) for _ in range(6)]
    assert len(set(seen)) == 2 and seen[:2] * 3 == seen
    other = pool.take((5, 25), np.float64)  # as many bytes
    assert address(other) == seen[0] and other.shape == (5, 25)


@pytest.mark.at_most(3)
def test_an_array_in_use_is_left_alone(comm):
    """Only one rank keeps a view; its next array of that turn is ordinary, and sums are right."""
    pool = SharedPool(comm)
    kept = pool.take(64, np.float64)
    where = address(kept)
    kept[...] = 5
    view = kept.reshape(8, 8)[1:3] if RANK == SIZE - 1 else None
    del kept
    pool.take(64, np.float64)
    again = pool.take(64, np.float64)
    assert (address(again) == where) == (view is None)
    expect_sum(comm, again, "direct")
    assert view is None or (view == 5).all()


def test_sizes_over_the_limit_are_ordinary(comm):
    pool = SharedPool(comm, limit=2 * 8000)
    assert is_shared(comm, pool.take(1000, np.float64))
    assert not is_shared(comm, pool.take(1))
    assert is_shared(comm, pool.take(1000, np.float64))


@pytest.mark.parametrize(("shape", "dtype"), [(-1, "u1"), (3, object), ((2, -3), "f4")])
def test_no_array_at_all(comm, shape, dtype):
    pool = SharedPool(comm)
    with pytest.raises(InvalidBuffer):
        pool.take(shape, dtype)
    assert is_shared(comm, pool.take(8))  # the ranks are where they were


def test_more_memory_than_there_is(comm):
    with pytest.raises(MemoryError, match="their node has"):
        SharedPool(comm, limit=1 << 60).take(1 << 50)


def test_a_tensor_keeps_the_memory(comm):
    torch = pytest.importorskip("torch")
    pool = SharedPool(comm)
    where = address(kept := pool.take(256, np.float32))
    kept[...] = 2
    part = torch.from_numpy(kept)[3:5]
    del kept
    assert address(pool.take(256, np.float32)) != where != address(pool.take(256, np.float32))
    assert part.tolist() == [2, 2]
    del part
    assert {address(pool.take(256, np.float32)) for _ in range(2)} > {where}
