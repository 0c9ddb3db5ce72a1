"""Sums without an order: the exact sum of all ranks' numbers, rounded once."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, InvalidBuffer, MismatchError, UnknownAlgorithm
from collectives.execution.exact import exact_sum
from tests.cases import slow_case

pytestmark = pytest.mark.quick_on(3)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TYPES = [np.float64, np.float32, np.float16, np.complex128, ">f8", ">f4", ">c16"]


@pytest.fixture(params=[False, slow_case(True)], ids=["", "check"])
def comm(request):
    with Communicator(MPI.COMM_WORLD, reproducible=True, check=request.param) as made:
        yield made


def numbers(count: int, dtype: type, rank: int) -> np.ndarray:
    """Numbers of very different sizes, so that each order of a plain sum gives other bits."""
    rng = np.random.default_rng([rank, count])
    spread = 3 if dtype is np.float16 else 20
    found = rng.standard_normal(count) * 10.0 ** rng.integers(-spread, spread / 4, count)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * rng.standard_normal(count)
    return found.astype(dtype)


def total(count: int, dtype: type, ranks: range) -> np.ndarray:
    out = np.zeros(count, dtype)
    if ranks:
        exact_sum([numbers(count, dtype, rank) for rank in ranks], out)
    return out


def same_bits(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 1000, 70_001])
def test_all_reduce(comm, dtype, count):
    mine, found = numbers(count, dtype, RANK), np.ones(count, dtype)
    wanted = total(count, dtype, range(SIZE))
    comm.Allreduce(mine, found)
    assert same_bits(found, wanted)
    for _ in range(2):
        found[:] = mine
        comm.Allreduce(MPI.IN_PLACE, found)
        assert same_bits(found, wanted)
    request = comm.Iallreduce(mine, found := np.ones(count, dtype))
    other = np.ones(1, np.int64)
    comm.Allreduce(MPI.IN_PLACE, other)  # between Start and Wait
    request.Wait()
    assert same_bits(found, wanted)
    assert other == SIZE
    plan = comm.Allreduce_init(mine, found)
    for _ in range(3):
        found[:] = 0
        plan.Start()
        while not plan.Test():
            pass
        assert same_bits(found, wanted)
    assert plan.algorithm == "exact" or comm.checks_messages
    plan.Free()
    assert same_bits(mine, numbers(count, dtype, RANK))


@pytest.mark.parametrize("count", [0, 1, 5, 3001])
def test_other_reductions(comm, count):
    dtype = np.float32
    mine, everybody = numbers(count, dtype, RANK), range(SIZE)
    for root in {0, SIZE - 1}:
        found = np.ones(count, dtype)
        comm.Reduce(mine, found if root == RANK else None, root=root)
        assert same_bits(found, total(count, dtype, everybody)) == (root == RANK or count == 0)
    comm.Scan(mine, found := np.ones(count, dtype))
    assert same_bits(found, total(count, dtype, range(RANK + 1)))
    comm.Exscan(mine, found := np.full(count, 7, dtype))
    assert same_bits(found, total(count, dtype, range(RANK)) if RANK else np.full(count, 7, dtype))


@pytest.mark.parametrize("count", [0, 1, 777])
def test_reduce_scatters(comm, count):
    dtype = np.float64
    wanted = total(count * SIZE, dtype, range(SIZE))[RANK * count : (RANK + 1) * count]
    mine = numbers(count * SIZE, dtype, RANK)
    comm.Reduce_scatter_block(mine, found := np.ones(count))
    assert same_bits(found, wanted)
    counts = [count * (rank % 3) for rank in range(SIZE)]
    start = sum(counts[:RANK])
    mine = numbers(sum(counts), dtype, RANK)
    wanted = total(sum(counts), dtype, range(SIZE))[start : start + counts[RANK]]
    comm.Reduce_scatter(mine, found := np.ones(counts[RANK]), counts)
    assert same_bits(found, wanted)
    comm.Reduce_scatter(MPI.IN_PLACE, mine, counts)
    assert same_bits(mine[: counts[RANK]], wanted)


def test_what_is_not_a_number_has_the_same_bits(comm):
    values = np.array([np.nan, np.inf, np.inf, 1.0])
    values[2] *= 1 if RANK else -1
    values[3] = -np.nan if RANK == SIZE - 1 else 1.0
    comm.Allreduce(values, found := np.empty(4))
    assert same_bits(found, np.array([np.nan, np.inf, np.nan if SIZE > 1 else -np.inf, np.nan]))


def test_what_would_have_an_order_is_refused(comm):
    items = np.ones(5)
    for algorithm in ("ring", "native"):
        with pytest.raises(UnknownAlgorithm, match=r"has no order, so '(ring|native)' cannot"):
            comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
    with pytest.raises(InvalidBuffer, match="has sums, maxima and minima"):
        comm.Allreduce(MPI.IN_PLACE, items, op=MPI.PROD)
    own = MPI.Op.Create(lambda *_: None, commute=True)
    for refused in (items, items.astype(int)):  # whose bytes may be a float's
        with pytest.raises(InvalidBuffer, match="may depend on the order"):
            comm.Allreduce(MPI.IN_PLACE, refused, op=own)
    own.Free()
    pair = np.zeros(1, [("value", np.float32), ("place", np.int32)])
    with pytest.raises(InvalidBuffer, match="may depend on the order"):
        comm.Allreduce(MPI.IN_PLACE, [pair, MPI.FLOAT_INT], op=MPI.MAXLOC)
    with pytest.raises(InvalidBuffer, match="no exact sums of"):
        comm.Allreduce(MPI.IN_PLACE, items.astype(np.longdouble))
    with pytest.raises(UnknownAlgorithm, match="let sums of int8 end at the largest one"):
        comm.Allreduce(MPI.IN_PLACE, items.astype(np.int8), algorithm="native")
    assert (items == 1).all()


@pytest.mark.parametrize("count", [1, 100_000])
def test_extremes_have_no_order(comm, count):
    mine = np.tile([np.nan if RANK == SIZE - 1 else 1.0, -0.0 if RANK else 0.0], count)
    for op, zero in ((MPI.MAX, 0.0), (MPI.MIN, -0.0 if SIZE > 1 else 0.0)):
        comm.Allreduce(mine, found := np.empty(2 * count), op=op)
        assert same_bits(found, np.tile([np.nan, zero], count))
    comm.Reduce(mine, found := np.empty(2 * count), op=MPI.MAX, root=0)
    assert RANK or same_bits(found, np.tile([np.nan, 0.0], count))


@pytest.mark.mpi(min_size=2)
def test_ranks_with_another_setting_are_found_by_checking():
    with Communicator(MPI.COMM_WORLD, reproducible=RANK == 0, check=True) as comm:
        for count in (4, 100_000):
            with pytest.raises(MismatchError, match="reproducible"):
                comm.Allreduce(np.ones(count), np.ones(count))
