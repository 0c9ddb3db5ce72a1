"""The v-variants beside the MPI library's own: lengths, gaps, in place, roots, every form."""

import msgspec
import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, InvalidBuffer, MismatchError, UnknownAlgorithm
from collectives.algorithms import ALGORITHMS
from collectives.calls.tuner import load

pytestmark = pytest.mark.mpi

SIZE = MPI.COMM_WORLD.size


def able(collective):
    return [*(a.name for a in ALGORITHMS if a.collective == collective and a.uneven), "auto"]


def spread(counts, gap):
    """Displacements with ``gap`` items between blocks, in reverse order if that is 2."""
    starts = np.cumsum([0, *counts[:-1]]) + gap * np.arange(len(counts))
    return [int(s) for s in starts]


def both(call, send, recv, algorithm):
    """What ours and native receive, from the same input."""
    results = []
    for name in ("native", algorithm):
        received = [None if r is None else r.copy() for r in [recv]]
        call(send, received[0], name)
        results.append(received[0])
    return results


def test_counts_of_a_reduce_scatter_may_be_an_array(comm):
    """As mpi4py takes them."""
    counts = np.arange(1, comm.size + 1)
    mine, found = np.repeat(counts.astype(float), counts), np.zeros(counts[comm.rank])
    for algorithm in ("native", "auto", "direct"):
        found[...] = 0
        comm.Reduce_scatter(mine, found, counts, algorithm=algorithm)
        assert (found == comm.size * (comm.rank + 1)).all()


@pytest.mark.parametrize("algorithm", ["native", "auto", "direct"])
def test_counts_are_read_once_of_arrays_too(comm, algorithm):
    """A plan keeps to the counts that it was made with, whatever their arrays hold later."""
    counts = np.arange(1, comm.size + 1)
    starts = np.cumsum([0, *counts[:-1]])
    expected = np.repeat(counts.astype(float), counts)
    room, mine = np.zeros(expected.size), np.full(counts[comm.rank], comm.rank + 1.0)
    gather = comm.Allgatherv_init(mine, [room, (counts, starts), MPI.DOUBLE], algorithm=algorithm)
    found = np.zeros(counts[comm.rank])
    sums = comm.Reduce_scatter_init(expected, found, counts, algorithm=algorithm)
    for _ in range(2):
        counts[...] = starts[...] = 0
        room[...] = found[...] = 0
        gather()
        sums()
        assert np.array_equal(room, expected)
        assert (found == comm.size * (comm.rank + 1)).all()


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("algorithm", able("allgather"))
def test_allgatherv(comm, algorithm, gap):
    for seed in range(8):
        counts = np.random.default_rng(seed).integers(0, 9, comm.size).tolist()
        starts = spread(counts, gap)
        mine = np.random.default_rng([seed, comm.rank]).random(counts[comm.rank])
        room = np.full(starts[-1] + counts[-1] + gap, -1.0)

        def call(send, recv, name, counts=counts, starts=starts):
            comm.Allgatherv(send, [recv, counts, starts, MPI.DOUBLE], algorithm=name)

        expected, got = both(call, mine, room, algorithm)
        assert np.array_equal(got, expected)
        in_place = room.copy()
        in_place[starts[comm.rank] :][: mine.size] = mine
        comm.Allgatherv(MPI.IN_PLACE, [in_place, counts, starts, MPI.DOUBLE], algorithm=algorithm)
        assert np.array_equal(in_place, expected)
        plan = comm.Allgatherv_init(mine, [room, (counts, starts)], algorithm=algorithm)
        for _ in range(2):
            room[...] = -1
            plan()
            assert np.array_equal(room, expected)
        plan.Free()


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("algorithm", able("alltoall"))
def test_alltoallv(comm, algorithm, gap):
    for seed in range(8):
        table = np.random.default_rng(seed).integers(0, 9, (comm.size, comm.size))
        sends, recvs = table[comm.rank].tolist(), table[:, comm.rank].tolist()
        mine = np.random.default_rng([seed, comm.rank]).random(sum(sends) + gap * comm.size)
        room = np.full(sum(recvs) + gap * comm.size, -1.0)
        at, to = spread(sends, gap), spread(recvs, gap)

        def call(send, recv, name, sends=sends, at=at, recvs=recvs, to=to):
            comm.Alltoallv(
                [send, sends, at, MPI.DOUBLE], [recv, (recvs, to), MPI.DOUBLE], algorithm=name
            )

        expected, got = both(call, mine, room, algorithm)
        assert np.array_equal(got, expected)
        comm.Ialltoallv([mine, (sends, at)], [room, (recvs, to)], algorithm=algorithm).Wait()
        assert np.array_equal(room, expected)


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("algorithm", able("gather"))
def test_gatherv_and_scatterv(comm, algorithm, gap):
    for seed in range(8):
        root = seed % comm.size
        counts = np.random.default_rng(seed).integers(0, 9, comm.size).tolist()
        starts = spread(counts, gap)
        mine = np.random.default_rng([seed, comm.rank]).random(counts[comm.rank])
        room = np.full(starts[-1] + counts[-1] + gap, -1.0)

        def gather(send, recv, name, counts=counts, starts=starts, root=root):
            recvbuf = [recv, counts, starts, MPI.DOUBLE] if comm.rank == root else None
            comm.Gatherv(send, recvbuf, root, algorithm=name)

        expected, got = both(gather, mine, room, algorithm)
        assert np.array_equal(got, expected)
        if comm.rank == root:
            room[starts[root] :][: mine.size] = mine
            comm.Gatherv(
                MPI.IN_PLACE, [room, counts, starts, MPI.DOUBLE], root, algorithm=algorithm
            )
            assert np.array_equal(room, expected)
        else:
            comm.Gatherv(mine, None, root, algorithm=algorithm)

        def scatter(send, recv, name, counts=counts, starts=starts, root=root):
            sendbuf = [send, counts, starts, MPI.DOUBLE] if comm.rank == root else None
            comm.Scatterv(sendbuf, recv, root, algorithm=name)

        expected, got = both(scatter, room, np.zeros_like(mine), algorithm)
        assert np.array_equal(got, expected)
        assert np.array_equal(got, mine)
        recvbuf = MPI.IN_PLACE if comm.rank == root else np.zeros_like(mine)
        scatter(room, recvbuf, algorithm)
        if comm.rank != root:
            assert np.array_equal(recvbuf, mine)


@pytest.mark.parametrize("algorithm", able("reduce_scatter"))
def test_reduce_scatter_of_unequal_blocks(comm, algorithm):
    for seed in range(8):
        counts = np.random.default_rng(seed).integers(0, 9, comm.size).tolist()
        mine = np.random.default_rng([seed, comm.rank]).integers(0, 99, sum(counts))

        def call(send, recv, name, counts=counts):
            comm.Reduce_scatter(send, recv, counts, algorithm=name)

        expected, got = both(call, mine, np.zeros(counts[comm.rank], int), algorithm)
        assert np.array_equal(got, expected)
        results = []
        for name in ("native", algorithm):
            whole = mine.copy()
            comm.Reduce_scatter(MPI.IN_PLACE, whole, counts, algorithm=name)
            results.append(whole[: counts[comm.rank]])
        assert np.array_equal(*results)


@pytest.mark.parametrize("first", [30_000, 0])
@pytest.mark.parametrize("start", ["Reduce_scatter", "Ireduce_scatter"])
def test_reduce_scatter_in_place_of_a_long_block_behind_a_short_one(
    tmp_path, monkeypatch, start, first
):
    """Where MPICH's own ends the job: it copies a block onto itself, from 512 KiB."""
    without = msgspec.structs.replace(load(), entries=[])  # so auto is native
    (tmp_path / "empty.json").write_bytes(msgspec.json.encode(without))
    monkeypatch.setenv("COLLECTIVES_TUNING", str(tmp_path / "empty.json"))
    comm = Communicator(MPI.COMM_WORLD)
    counts = [first, *[70_000] * (comm.size - 1)]
    ends = np.cumsum(counts)
    mine = np.random.default_rng(comm.rank).integers(0, 99, ends[-1])
    expected = np.zeros_like(mine)
    MPI.COMM_WORLD.Allreduce(mine, expected)
    request = getattr(comm, start)(MPI.IN_PLACE, mine, counts)
    if request is not None:
        request.Wait()
    block = slice(ends[comm.rank] - counts[comm.rank], ends[comm.rank])
    assert np.array_equal(mine[: counts[comm.rank]], expected[block])
    comm.close()


@pytest.mark.parametrize("collective", ["Reduce_scatter", "Allgatherv", "Alltoallv"])
def test_as_many_segments_as_all_ranks_find_best(comm, collective):
    """A rank with a long block would cut it into more than one with a short block."""
    counts = [200_000 if rank == 1 else 100 for rank in range(comm.size)]
    mine, algorithm = counts[comm.rank], "ring:segments=auto"
    if collective == "Reduce_scatter":
        recv = np.zeros(mine)
        comm.Reduce_scatter(np.ones(sum(counts)), recv, counts, algorithm=algorithm)
        assert (recv == comm.size).all()
    elif collective == "Allgatherv":
        recv = np.zeros(sum(counts))
        comm.Allgatherv(np.full(mine, float(comm.rank)), [recv, counts], algorithm=algorithm)
        np.testing.assert_array_equal(recv, np.repeat(np.arange(comm.size), counts))
    else:
        recv, algorithm = np.zeros(sum(counts)), "pairwise:segments=auto"
        send = np.full(mine * comm.size, comm.rank, float)
        comm.Alltoallv([send, [mine] * comm.size], [recv, counts], algorithm=algorithm)
        np.testing.assert_array_equal(recv, np.repeat(np.arange(comm.size), counts))


def test_counts_that_do_not_fit(comm):
    room, ones = np.zeros(3 * comm.size), [1] * comm.size
    for specification, sentence in (
        ([room, [1] * (comm.size + 1)], "counts, but there are"),
        ([room, [9] * comm.size], "but block 0 is|but block . is 9 items"),
        ([room, (ones, [-5] * comm.size)], "from item -5 on"),
    ):
        with pytest.raises(InvalidBuffer, match=sentence):
            comm.Allgatherv(np.zeros(1), specification, algorithm="ring")
    with pytest.raises(InvalidBuffer, match="16 bytes, but the counts say 8"):
        comm.Allgatherv(np.zeros(2), [room, ones], algorithm="ring")
    with pytest.raises(UnknownAlgorithm, match="needs blocks of equal length"):
        comm.Allgatherv(np.zeros(1), [room, ones], algorithm="bruck")
    with pytest.raises(InvalidBuffer, match="one for each rank, not"):
        comm.Reduce_scatter(room, np.zeros(3), [3] * (comm.size + 1), algorithm="ring")


@pytest.mark.parametrize("algorithm", ["pairwise", "linear", "auto"])
def test_alltoall_in_place_as_a_plan(comm, algorithm):
    """Where Open MPI's own nonblocking one is wrong."""
    for seed in range(4):
        table = np.random.default_rng(seed).choice([0, 2400, 8930, 12500], (comm.size, comm.size))
        counts = np.maximum(table, table.T)[comm.rank].tolist()
        mine = np.random.default_rng([seed, comm.rank]).integers(0, 9, sum(counts), np.int32)
        expected, got = np.zeros_like(mine), mine.copy()
        MPI.COMM_WORLD.Alltoallv([mine, counts], [expected, counts])
        comm.Ialltoallv(MPI.IN_PLACE, [got, counts], algorithm=algorithm).Wait()
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("algorithm", ["dissemination", "native", "auto"])
def test_barrier(comm, algorithm):
    """Nobody is through before the last has come."""
    flags = comm.empty(comm.size, np.int64)
    everybody = np.zeros(comm.size, np.int64)
    for turn in range(1, 20):
        flags[comm.rank] = turn
        arrived = comm.allgather(None)
        assert len(arrived) == comm.size
        comm.Barrier(algorithm=algorithm)
        comm.Ibarrier(algorithm=algorithm).Wait()
        plan = comm.Barrier_init(algorithm=algorithm)
        plan()
        plan.Free()
        comm.Allreduce(flags, everybody, op=MPI.MAX, algorithm="ring")
        assert (everybody == turn).all()


def test_a_default_algorithm_is_for_the_collectives_that_have_it(comm):
    other = type(comm)(comm, algorithm="ring")
    with other:
        items = np.full(3, float(comm.rank))
        other.Allreduce(MPI.IN_PLACE, items)
        assert other.last_plan.algorithm == "ring"
        other.Bcast(items)
        other.Barrier()
        assert other.last_plan.algorithm == "native"


@pytest.mark.parametrize("algorithm", ["auto", "pairwise", "native"])
@pytest.mark.mpi(min_size=2)
def test_with_checks_all_ranks_hear_that_a_rank_does_not_fit_itself(algorithm):
    """MPI libraries refuse it on this rank alone, or not at all."""
    mine, theirs = [4, *[2] * (SIZE - 1)], [3, *[2] * (SIZE - 1)]
    sent, received = np.ones(sum(mine)), np.zeros(sum(mine))
    with Communicator(MPI.COMM_WORLD, check=True) as comm:
        rank_0 = comm.rank == 0
        others = [*(2 for _ in range(SIZE))]
        counts = (mine, theirs) if rank_0 else (others, others)
        with pytest.raises(MismatchError, match="sends 32 bytes to itself and receives 24"):
            comm.Alltoallv([sent, counts[0]], [received, counts[1]], algorithm=algorithm)
        if algorithm == "pairwise":
            return
        root = [received, counts[1]] if rank_0 else None
        with pytest.raises(MismatchError, match="sends 32 bytes to itself and receives 24"):
            comm.Gatherv(np.ones(4 if rank_0 else 2), root, algorithm=algorithm)
        root = [sent, counts[0]] if rank_0 else None
        with pytest.raises(MismatchError, match="sends 32 bytes to itself and receives 24"):
            comm.Scatterv(root, np.zeros(3 if rank_0 else 2), algorithm=algorithm)
        comm.Alltoallv([sent, others], [received, others], algorithm=algorithm)


def test_counts_that_do_not_fit_the_rank_itself(comm):
    counts = np.full(comm.size, 2)
    with pytest.raises(InvalidBuffer, match=f"rank {comm.rank} sends 16 bytes to itself"):
        comm.Alltoallv(
            [np.ones(2 * comm.size), counts],
            [np.ones(2 * comm.size), counts - (np.arange(comm.size) == comm.rank)],
            algorithm="pairwise",
        )
