"""The v-variants beside the MPI library's own: lengths, gaps, in place, roots, every form."""

import msgspec
import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, MismatchError
from collectives.calls.tables import load

SIZE = MPI.COMM_WORLD.size


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
