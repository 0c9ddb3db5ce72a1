"""A program's own algorithms: proved before they run, compared across ranks, run in every form."""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Algorithm, MismatchError, ScheduleError, UnknownAlgorithm, register
from collectives.algorithms import butterfly, find, ring
from collectives.analysis.user_code import resolve
from tests.local.shared_ranks import reduces_in_turn
from tests.mpi.collectives.forms import FORMS, run

pytestmark = pytest.mark.quick_on(3)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.mpi(min_size=2)
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "own_algorithm.py")


both_memories = pytest.mark.parametrize("memory", ["messages", "shared"])


def expect_sum(comm, memory, algorithm, form="blocking", in_place=False, items=1000):
    send, recv = comm.empty((2, items)) if memory == "shared" else np.empty((2, items))
    own = np.arange(items) + RANK
    for _ in range(2):
        send[:], recv[:] = own, own if in_place else -1
        given = MPI.IN_PLACE if in_place else send
        run(comm, form, "Allreduce", given, recv, algorithm=algorithm)
        np.testing.assert_array_equal(recv, SIZE * np.arange(items) + SIZE * (SIZE - 1) // 2)


@pytest.mark.parametrize("spelled", [EXAMPLE, "both_ways", "both_ways:segments=3"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("form", FORMS)
@both_memories
def test_it_runs_in_every_form(comm, memory, form, in_place, spelled):
    resolve(EXAMPLE)
    expect_sum(comm, memory, spelled, form, in_place)
    assert "both_ways" in comm.last_plan.algorithm


def in_later_rounds(rank, size):
    """A ring whose messages arrive in later rounds than they leave in, as rank 0 pauses."""
    for steps in ring.allreduce(rank, size):
        if rank == 0:
            yield ()
        yield steps


@pytest.mark.skipif(SIZE != 3, reason="for 3 ranks")
@both_memories
def test_a_round_reduces_in_the_order_in_which_it_says(comm, memory):
    own = Algorithm("allreduce", "in_turn", reduces_in_turn, chunks=lambda size: 2)
    expect_sum(comm, memory, own)


@several
@both_memories
def test_messages_that_arrive_in_later_rounds(comm, memory):
    own = Algorithm("allreduce", "later", in_later_rounds, chunks=lambda size: size)
    expect_sum(comm, memory, own)
    with pytest.raises(UnknownAlgorithm, match="no segments, as some messages leave in a round"):
        expect_sum(comm, memory, "later:segments=2")


def test_a_schedule_made_of_others_has_the_root_that_is_asked_for(comm):
    def of_the_tree(size, root):
        return find("broadcast", "binomial_tree").schedule(size, root)

    def of_rank_0(size, root):
        return find("broadcast", "binomial_tree").schedule(size)

    right = Algorithm("broadcast", "of_the_tree", None, compose=of_the_tree)
    wrong = Algorithm("broadcast", "of_rank_0", None, compose=of_rank_0)
    values = np.full(5, float(RANK))
    comm.Bcast(values, root=SIZE - 1, algorithm=right)
    assert (values == SIZE - 1).all()
    if SIZE > 1:
        with pytest.raises(ScheduleError, match="gave a schedule of root 0, not 1"):
            comm.Bcast(values, root=1, algorithm=wrong)


@several
def test_ranks_that_register_different_ones_all_raise(comm):
    rounds = ring.allreduce if RANK == 0 else butterfly.recursive_doubling
    chunks = (lambda size: size) if RANK == 0 else (lambda size: 1)
    different = Algorithm("allreduce", "different", rounds, chunks=chunks)
    for _ in range(2):
        with pytest.raises(MismatchError, match="registered another algorithm of this name"):
            comm.Allreduce(MPI.IN_PLACE, np.ones(4), algorithm=different)
    comm.Allreduce(MPI.IN_PLACE, np.ones(4), algorithm="ring")


def late(rank, size, extra=1):
    """A ring that forgets a round if ``extra`` is 2: proved with 1, as that is the default."""
    rounds = list(ring.allreduce(rank, size))
    yield from rounds if extra == 1 else rounds[:-1]


@several
def test_what_was_not_proved_when_it_was_registered_is_proved_before_it_runs(comm):
    register(Algorithm("allreduce", "late", late, chunks=lambda size, extra=1: size))
    total = np.ones(8)
    comm.Allreduce(MPI.IN_PLACE, total, algorithm="late:extra=1")
    assert total.tolist() == [SIZE] * 8
    with pytest.raises(ScheduleError, match=r"ends with recvbuf\[\d\]"):
        comm.Allreduce(MPI.IN_PLACE, total, algorithm="late:extra=2")
    with pytest.raises(ScheduleError, match=r"ends with recvbuf\[\d\]"):
        comm.Allreduce_init(MPI.IN_PLACE, total, algorithm="late:extra=2,segments=2")


@both_memories
def test_what_was_proved_is_what_runs(comm, memory):
    """A generator may go by something that changes later."""
    forgotten = [0]

    def changing(rank, size):
        rounds = list(ring.allreduce(rank, size))
        yield from rounds[: len(rounds) - forgotten[0]]

    name = f"changing_{memory}"
    own = Algorithm("allreduce", name, changing, chunks=lambda size: size)
    for items in (8, 16):
        expect_sum(comm, memory, own, items=items)
        forgotten[0] = 1


@several
@pytest.mark.parametrize("is_proved", [False, True])
@pytest.mark.parametrize("without", [0, SIZE - 1])
def test_a_file_that_one_rank_does_not_have(comm, tmp_path, without, is_proved):
    """Ranks that know its algorithm by name already hear of the other's trouble all the same."""
    name, path, total = f"no_{without}_{is_proved}", tmp_path / f"without_{without}.py", np.ones(4)
    if without != RANK:
        path.write_text(
            "from collectives import Algorithm\nfrom collectives.algorithms import butterfly\n"
            f"a = Algorithm('allreduce', '{name}', butterfly.recursive_doubling)\n"
        )
    if is_proved:
        own = Algorithm("allreduce", name, butterfly.recursive_doubling)
        comm.Allreduce(MPI.IN_PLACE, np.ones(4), algorithm=own)
    for asked in (f"{path}", f"{path}:{name}"):
        with pytest.raises((MismatchError, UnknownAlgorithm), match="there is no file"):
            comm.Allreduce(MPI.IN_PLACE, total, algorithm=asked)
    with pytest.raises((MismatchError, UnknownAlgorithm), match=r"no file|of allreduce"):
        comm.Allgather(total, np.ones(4 * SIZE), algorithm=f"{path}")
    comm.Allreduce(MPI.IN_PLACE, total, algorithm=name if is_proved else "ring")
    assert (total == SIZE).all()
