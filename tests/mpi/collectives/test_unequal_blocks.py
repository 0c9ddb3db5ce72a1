"""The v-variants beside the MPI library's own: lengths, gaps, in place, roots, every form."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, MismatchError
from tests.mpi.collectives.forms import RANK, P, run, tuned


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
@pytest.mark.parametrize("form", ["blocking", "nonblocking"])
def test_reduce_scatter_in_place_of_a_long_block_behind_a_short_one(tmp_path, form, first):
    """Where MPICH's own ends the job: it copies a block onto itself, from 512 KiB."""
    with Communicator(MPI.COMM_WORLD, tuning=tuned(tmp_path)) as comm:  # so auto is native
        counts = [first, *[70_000] * (comm.size - 1)]
        ends = np.cumsum(counts)
        mine = np.random.default_rng(comm.rank).integers(0, 99, ends[-1])
        expected = np.zeros_like(mine)
        MPI.COMM_WORLD.Allreduce(mine, expected)
        run(comm, form, "Reduce_scatter", MPI.IN_PLACE, mine, counts)
        block = slice(ends[comm.rank] - counts[comm.rank], ends[comm.rank])
        assert np.array_equal(mine[: counts[comm.rank]], expected[block])


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
        assert len(comm.allgather(None)) == comm.size
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
    is_root, twos = RANK == 0, [2] * P
    sends, receives = ([4, *twos[1:]], [3, *twos[1:]]) if is_root else (twos, twos)
    sent, received = np.ones(2 * P + 2), np.zeros(2 * P + 2)
    calls = {
        "Alltoallv": ([sent, sends], [received, receives]),
        "Gatherv": (sent[: sends[0]], [received, receives] if is_root else None),
        "Scatterv": ([sent, sends] if is_root else None, received[: receives[0]]),
    }
    with Communicator(MPI.COMM_WORLD, check=True) as comm:
        for name, given in calls.items():
            if name == "Alltoallv" or algorithm != "pairwise":
                with pytest.raises(MismatchError, match="sends 32 bytes to itself and receives 24"):
                    getattr(comm, name)(*given, algorithm=algorithm)
        comm.Alltoallv([sent, twos], [received, twos], algorithm=algorithm)
