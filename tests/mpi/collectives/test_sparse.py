"""The sparse all-reduce on real ranks, against dense sums in float64."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, InvalidBuffer, MismatchError
from collectives.codec import Residual
from collectives.sparse import SparseAllreduce, Traffic, sparse_allreduce

pytestmark = pytest.mark.quick_on(3)

TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
HEADER = 16
WAYS = pytest.mark.parametrize("way", ["recursive_doubling", "split_allgather"])
#: Where a rank has pairs.
PATTERNS = {
    "empty": lambda rank, size, length, rng: np.empty(0),
    "one rank only": lambda rank, size, length, rng: np.arange(3 if rank == size - 1 else 0),
    "disjoint": lambda rank, size, length, rng: np.arange(rank, length, 3 * size),
    "identical": lambda rank, size, length, rng: np.arange(0, length, 10),
    "drawn": lambda rank, size, length, rng: rng.choice(length, length // 9, replace=False),
    "filling up": lambda rank, size, length, rng: rng.choice(length, length // 3, replace=False),
    "full": lambda rank, size, length, rng: np.arange(length),
    "dense and empty": lambda rank, size, length, rng: np.arange(length if rank % 2 else 0),
}


def pairs(pattern, rank, size, length, dtype, index_type=np.uint32):
    """Pairs that ``rank`` gives: small whole numbers, whose sums every type represents."""
    rng = np.random.default_rng([7, rank])
    indices = np.sort(PATTERNS[pattern](rank, size, length, rng)).astype(index_type)
    return indices, rng.integers(-3, 4, len(indices)).astype(dtype)


def dense(result, length):
    """The vector that a result stands for, in float64."""
    if isinstance(result, np.ndarray):
        assert result.shape == (length,)
        return result.astype(np.float64)
    indices, values = result
    assert (indices[1:] > indices[:-1]).all()
    vector = np.zeros(length)
    vector[indices] = values.astype(np.float64)
    return vector


def check_same(comm, result):
    """All ranks have the same form, bit for bit."""
    arrays = [result] if isinstance(result, np.ndarray) else list(result)
    told = [(array.dtype.name, array.tobytes()) for array in arrays]
    assert all(other == told for other in MPI.Intracomm(comm).allgather(told))


@WAYS
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sum(comm, pattern, dtype, way):
    for length, index_type in ((3, np.uint64), (100, np.uint32), (1001, np.uint64)):
        for dense_at in (None, 0, 5, length):
            drawn = comm.size, length, dtype, index_type
            given = [pairs(pattern, rank, *drawn) for rank in range(comm.size)]
            how = {"dense_at": dense_at, "algorithm": way}
            result = sparse_allreduce(comm, *given[comm.rank], length, **how)
            assert np.array_equal(dense(result, length), sum(dense(each, length) for each in given))
            check_same(comm, result)
            different = len(set().union(*(indices.tolist() for indices, _ in given)))
            if dense_at == length or (way == "recursive_doubling" and different <= (dense_at or 0)):
                assert not isinstance(result, np.ndarray)
                assert result[0].dtype == index_type
            if dense_at == 0 and different:
                assert isinstance(result, np.ndarray)
            kept = result if isinstance(result, np.ndarray) else result[1]
            assert kept.dtype == dtype


@WAYS
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
def test_rounding_is_the_same_everywhere(comm, dtype, way):
    """Numbers whose sums do round: bitwise equal on all ranks, near the reference."""
    length = 2000
    given = []
    for rank in range(comm.size):
        rng = np.random.default_rng([11, rank])
        indices = np.sort(rng.choice(length, length // 5, replace=False)).astype(np.uint32)
        given.append((indices, rng.standard_normal(len(indices)).astype(dtype)))
    result = sparse_allreduce(comm, *given[comm.rank], length, algorithm=way)
    check_same(comm, result)
    wanted = sum(dense(each, length) for each in given)
    largest = sum(np.abs(dense(each, length)) for each in given)
    error = np.abs(dense(result, length) - wanted)
    assert (error <= 4 * float(ml_dtypes.finfo(dtype).eps) * largest).all()


def test_the_order_of_operands_is_that_of_the_ranks(comm):
    """1e8 and -1e8 of the first two ranks cancel before a small number is lost in them; a pair
    whose sum is zero stays."""
    cancelled = (comm.rank == 0) - (comm.rank == comm.size - 1)
    given = np.array([cancelled, [1e8, -1e8, 1, 1, 1, 1, 1, 1][comm.rank % 8]], np.float32)
    indices, values = sparse_allreduce(comm, np.array([4, 7], np.uint32), given, 100)
    assert indices.tolist() == [4, 7] and values[0] == 0
    if 1 < comm.size <= 8:
        assert values[1] == comm.size - 2


def test_the_split_sends_each_pair_once_and_each_sum_to_all(comm):
    """Whatever the number of ranks: less than recursive doubling where they choose alike."""
    length, traffic, p = 1000 * comm.size, Traffic(), comm.size
    indices = np.arange(0, length, 100, dtype=np.uint32)  # 10 in each part
    ones = np.ones(len(indices), np.float32)
    how = {"traffic": traffic, "algorithm": "split_allgather"}
    found, total = sparse_allreduce(comm, indices, ones, length, **how)
    assert found.tolist() == indices.tolist() and (total == p).all()
    assert traffic.sent == 2 * (p - 1) * (HEADER + (2 + 4) * 10)
    assert traffic.dense == 2 * (p - 1) * 4000


@pytest.mark.parametrize("length", [1, 3, 40, 1001])
def test_a_ring_loses_nothing_that_it_prunes(comm, length):
    """Sums of quarters are exact: what all were told and what they have left is what they had."""
    rng, keep, steps = np.random.default_rng([3, comm.rank]), max(1, length // 9), 12
    left, given, told = Residual(np.zeros(length)), np.zeros(length), np.zeros(length)
    with Communicator(comm) as own:
        plan, traffic = SparseAllreduce(own, length, "f8", "pruned_ring"), own.count_traffic()
        for step in range(steps):
            x = rng.integers(-9, 10, length) / 4
            given += x * (step != 5)
            left.add_to(x)
            chosen = np.sort(np.argsort(np.abs(x))[-keep:]).astype(np.uint32)
            sent = np.zeros(length)
            sent[chosen] = x[chosen]
            left.keep(x, sent)
            plan.give(chosen, x[chosen])
            before = traffic.sent
            plan.Start()
            plan.Wait()
            most = HEADER + (2 + 8) * -(-keep // comm.size)
            assert traffic.sent - before <= 2 * (comm.size - 1) * most
            total = plan.total.values if plan.total.indices is None else tuple(plan.total)
            check_same(comm, total)
            left.give_back(*plan.pruned)
            if step == 5:  # the step is skipped: nothing has happened
                left.rollback()
                continue
            left.commit()
            told += dense(total, length)
        plan.Free()
    sums = np.array([sum(MPI.Intracomm(comm).allgather(part)) for part in (given, left.value)])
    assert np.array_equal(sums[0], told + sums[1])
    assert told.any() and (sums[1].any() or length == 1)


def test_a_ring_prunes_the_smallest_and_names_them_once(comm):
    """All ranks choose the same places of one part, which has more than its share of pairs."""
    p, length = comm.size, 30 * comm.size
    indices, values = np.arange(6, dtype=np.uint32), np.array([6.0, -5, 4, 3, -2, 1])
    with Communicator(comm) as own:
        plan = SparseAllreduce(own, length, "f8", "pruned_ring")
        plan.give(indices, values)
        plan.Start()
        plan.Wait()
        most = -(-6 // p)
        assert plan.total.indices.tolist() == [*range(most)]
        assert np.array_equal(plan.total.values, p * values[:most])
        places, dropped = plan.pruned
        assert dict(zip(places.tolist(), dropped)) == dict(zip(range(most, 6), values[most:]))
        plan.Free()


def test_indices_that_lie_far_apart_travel_whole(comm):
    """A gap of 65,534 places fits into 16 bits, one more does not."""
    indices = np.array([0, 65_535, 131_071, 4_000_000_000], np.uint32)
    traffic = Traffic()
    for kind, last in ((np.uint32, 2**32 - 1), (np.uint64, 2**60)):
        given = np.append(indices.astype(kind), kind(last))
        ones = np.ones(5, np.float16)
        found, total = sparse_allreduce(comm, given, ones, last + 1, traffic=traffic)
        assert found.tolist() == given.tolist() and (total == comm.size).all()
    if comm.size == 2:
        assert traffic.sent == 2 * (HEADER + 5 * (2 + 2)) + 3 * (4 + 8)


@WAYS
def test_a_vector_may_be_longer_than_its_indices_reach(comm, way):
    """The last ranks of a split then have parts behind all indices of 32 bits."""
    given = np.array([0, 2**32 - 1], np.uint32)
    found, total = sparse_allreduce(comm, given, np.ones(2), 2**40, algorithm=way)
    assert found.tolist() == given.tolist() and (total == comm.size).all()


def test_bytes_on_the_wire(comm):
    """One per cent of pairs: what is sent is what the pairs take, and far less than the vector."""
    length, traffic = 100_000, Traffic()
    indices = np.arange(0, length, 100, dtype=np.uint32)
    values = np.ones(len(indices), np.float16)
    result = sparse_allreduce(comm, indices, values, length, traffic=traffic)
    assert (result[1] == comm.size).all()
    sends = traffic.dense // (2 * length)
    assert traffic.messages == 2 * sends
    assert traffic.sent == sends * (HEADER + (2 + 2) * len(indices))
    assert bool(sends) == (comm.size > 1)
    assert traffic.dense == 0 or traffic.sent < traffic.dense / 30
    before = traffic.sent
    sparse_allreduce(comm, indices, values, length, dense_at=0, traffic=traffic)
    assert traffic.sent - before == sends * (HEADER + 2 * length)


def test_ranks_switch_one_by_one(comm):
    """Full vectors travel as vectors while others are still pairs."""
    length, traffic = 1000, Traffic()
    full = comm.rank == 0
    indices = np.arange(length if full else 1, dtype=np.uint32)
    ones = np.ones(len(indices), np.float32)
    result = sparse_allreduce(comm, indices, ones, length, traffic=traffic)
    assert isinstance(result, np.ndarray)
    assert result.tolist() == [comm.size] + [1] * (length - 1)
    if comm.size == 2:
        assert traffic.sent == HEADER + (4 * length if full else 6)
        assert traffic.messages == (1 if full else 2)


U4 = np.uint32
GOOD = np.array([1, 2], U4), np.array([1.0, 2.0]), 10
NONE = np.array([], U4), np.ones(0)
BAD = [
    ("comes after 5; sort", np.array([5, 2], U4), np.ones(2), 10),
    ("index 5 comes twice", np.array([5, 5], U4), np.ones(2), 10),
    ("index 10 lies outside of a vector of 10", np.array([1, 10], U4), np.ones(2), 10),
    ("convert them to uint32", np.array([1, 2]), np.ones(2), 10),
    ("convert them to uint32", np.array([None, object()]), np.ones(2), 10),
    ("convert them to floating point", np.array([1, 2], U4), np.array([None, 1.0]), 10),
    ("convert them to floating point", np.array([1, 2], U4), np.array([True, False]), 10),
    ("of the same length", np.array([1, 2], U4), np.ones(3), 10),
    ("of the same length", None, np.ones(3), 10),
    ("ValueError: .*inhomogeneous", [[1], [1, 2]], np.ones(2), 10),
    ("length cannot be -1", *NONE, -1),
    ("length cannot be 1208925819614629174706176", *NONE, 1 << 80),
    ("has too many bytes", *NONE, 1 << 62),
    ("length is '10', of type str; give an integer", *NONE, "10"),
    ("length is True, of type bool", *NONE, True),
    ("dense_at is '3', of type str", *NONE, 10, "3"),
    ("dense_at cannot be -1", *NONE, 10, -1),
    ("dense_at cannot be 1208925819614629174706176", *NONE, 10, 1 << 80),
    ("traffic is a Traffic, not a dict", *NONE, 10, None, {}),
    ("algorithm is 'ring'; there are recursive_d", *NONE, 10, 1, None, "ring"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[0])
def test_one_ranks_mistake_is_raised_on_all(comm, bad):
    reason, *arguments = bad
    last = comm.size - 1
    usual = (*GOOD, 3, None, "split_allgather")
    given = (*arguments, *usual[len(arguments) :]) if comm.rank == last else usual
    *given, dense_at, traffic, way = given
    with pytest.raises(InvalidBuffer, match=f"rank {last}: .*{reason}"):
        sparse_allreduce(comm, *given, dense_at=dense_at, traffic=traffic, algorithm=way)
    indices, _ = sparse_allreduce(comm, *GOOD, dense_at=10)  # and it goes on
    assert indices.tolist() == [1, 2]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("length: 10 and 20", (*GOOD[:2], 20, 3)),
        ("type of the values", (GOOD[0], GOOD[1].astype("f4"), 10, 3)),
        ("type of the indices", (GOOD[0].astype("u8"), *GOOD[1:], 3)),
        ("dense_at: 3 and 4", (*GOOD, 4)),
    ],
)
def test_calls_that_do_not_belong_together(comm, what, other):
    *given, dense_at = other if comm.rank == comm.size - 1 else (*GOOD, 3)
    with pytest.raises(MismatchError, match=f"differ in {what}"):
        sparse_allreduce(comm, *given, dense_at=dense_at)
