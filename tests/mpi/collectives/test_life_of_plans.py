"""Plans that are under way, left, freed, dropped, or many; and what goes on meanwhile."""

import gc
import os
import signal
import time
import warnings
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError, Communicator, InvalidBuffer, MismatchError
from collectives.calls.bind import Binder
from tests.mpi.collectives.forms import expect_sum, expect_well, fresh, refused_in_child, total

comm = pytest.fixture(fresh)
two_or_more = pytest.mark.mpi(min_size=2)
few_enough = pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="shown on up to 4 ranks")


@pytest.mark.quick_on(2, 3)
@two_or_more
@few_enough
def test_counters_are_not_given_out_twice(comm):
    """A plan that is under way while hundreds come and go."""
    kept, short = comm.empty(1000), comm.empty(1000)
    plan = comm.Allreduce_init(MPI.IN_PLACE, kept, algorithm="direct")
    for turn in range(530):
        kept[...], short[...] = comm.rank + turn, comm.rank
        plan.Start()
        other = comm.Iallreduce(MPI.IN_PLACE, short, algorithm="direct")
        if comm.rank == 0 and turn in (508, 509, 510, 511):
            time.sleep(0.02)
        plan.Wait()
        assert (kept == turn * comm.size + total(comm)).all()
        other.Wait()
        assert (short == total(comm)).all()


@pytest.mark.quick_on(2, 3)
@few_enough
@pytest.mark.parametrize("make", [np.zeros, None], ids=["messages", "shared"])
def test_more_plans_than_counters(comm, make):
    arrays = (make or comm.empty)((540, 8))
    plans = [comm.Allreduce_init(MPI.IN_PLACE, a, algorithm="direct") for a in arrays]
    for items, plan in zip(arrays, plans):
        items[...] = comm.rank
        plan.Start()
    for plan in plans[::-1] if comm.rank else plans:
        plan.Wait()
    assert (arrays == total(comm)).all()
    # Dropped in another order on each rank, some not at all: new ones still work.
    del plan, plans[comm.rank % 3 :: 2]
    gc.collect()
    for items in arrays[:40]:
        expect_sum(comm, items, "direct", form="nonblocking")


def overflowing(comm, algorithm):
    big = np.full(3000, 1e308)
    big[0] = 1e308 if comm.rank else -1e308
    comm.Allreduce(MPI.IN_PLACE, big, op=MPI.SUM, algorithm=algorithm)
    assert comm.size == 1 or np.isinf(big[1:]).all()


@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "direct", "native"])
def test_an_overflow_raises_on_no_rank(comm, algorithm):
    """As MPI's operations never do; a rank that raised would leave the others."""
    for _ in range(2):
        with np.errstate(all="raise"):
            overflowing(comm, algorithm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            overflowing(comm, algorithm)
    expect_well(comm, algorithm)


class Alarm(Exception):
    pass


def left(call):
    """Rank 0, whom the others keep waiting, makes it until a signal ends it."""
    before = signal.signal(signal.SIGALRM, Mock(side_effect=Alarm))
    if MPI.COMM_WORLD.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Alarm):
            while True:
                call()
    signal.signal(signal.SIGALRM, before)


@two_or_more
@pytest.mark.parametrize(("shared", "way"), [(True, "blocking"), (True, "plan"), (False, "plan")])
def test_a_collective_that_a_signal_left(shared, way):
    """All later ones say so; the MPI library's own and a new communicator go on."""
    with Communicator(MPI.COMM_WORLD) as comm:
        items = comm.empty(100) if shared else np.zeros(100)
        plan = comm.Allreduce_init(MPI.IN_PLACE, items, algorithm="butterfly")
        other = comm.Allreduce_init(MPI.IN_PLACE, np.zeros(3), algorithm="ring")

        def blocking():
            comm.Allreduce(MPI.IN_PLACE, items, algorithm="butterfly")

        def started():  # two, so that the wait is no single one inside MPI
            other.Start()
            plan.Start()
            plan.Wait()

        blocking()
        left(blocking if way == "blocking" else started)
        if comm.rank == 0:
            for act in (
                blocking,
                lambda: comm.Iallreduce(MPI.IN_PLACE, np.zeros(4), algorithm="ring"),
                *([plan.Wait, plan.Test] if way == "plan" else [other.Start, other]),
            ):
                with pytest.raises(CollectiveError, match="left in the middle by Alarm"):
                    act()
        expect_well(comm, "native")
        with Communicator(MPI.COMM_WORLD) as another:
            expect_well(another, "butterfly")
        MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0 and way == "plan":  # the communicator has given it up
        with pytest.raises(CollectiveError, match="left in the middle by Alarm"):
            other.Wait()


@pytest.mark.parametrize("way", ["blocking", "plan"])
@pytest.mark.parametrize("error", [MemoryError, Alarm])
def test_an_error_behind_the_meeting_of_the_ranks(comm, monkeypatch, way, error):
    """Which other ranks may not have, so that they go on with the call."""
    items = comm.empty(100) if way == "blocking" else np.zeros(100)
    call = comm.Allreduce if way == "blocking" else comm.Allreduce_init
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(Binder, "_bind", Mock(side_effect=error))
        call(MPI.IN_PLACE, items, algorithm="ring")
    with pytest.raises(CollectiveError, match=f"left in the middle by {error.__name__}"):
        call(MPI.IN_PLACE, items, algorithm="ring")
    expect_well(comm, "native")


@two_or_more
@pytest.mark.parametrize("way", ["check", "counts"])
def test_an_agreement_that_a_signal_left(way):
    with Communicator(MPI.COMM_WORLD, check=way == "check") as comm:
        given = np.ones(comm.size), np.zeros(1)
        comm.Allreduce(np.ones(3), np.zeros(3), algorithm="ring")
        left(lambda: comm.Reduce_scatter(*given, algorithm="direct"))
        MPI.COMM_WORLD.Barrier()
        if comm.rank == 0:
            with pytest.raises(CollectiveError, match="left in the middle by Alarm"):
                comm.Reduce_scatter(*given, algorithm="direct")
    with Communicator(MPI.COMM_WORLD) as another:
        expect_well(another)


@two_or_more
@pytest.mark.parametrize("items", [10, 2_000_000])
def test_the_librarys_own_goes_on_while_a_rank_waits_in_shared_memory(comm, items):
    """Another rank waits for it before it comes to where this one waits."""
    shared, ordinary = comm.empty(1000), np.ones(items)
    shared[...] = comm.rank
    request = MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, ordinary)
    if comm.rank:
        request.Wait()
    comm.Allreduce(MPI.IN_PLACE, shared, algorithm="direct")
    request.Wait()
    assert (ordinary == comm.size).all() and (shared == total(comm)).all()


@two_or_more
@pytest.mark.parametrize("way", ["blocking", "nonblocking", "persistent", "run", "auto"])
def test_a_plan_goes_on_while_its_rank_waits_for_the_librarys_own(comm, way):
    """As MPI lets ranks wait for what they have started in any order; a blocking call begins when
    the others have ended ours, and matches theirs."""
    size = 100_000 if way == "auto" else 1000
    ours = comm.empty(size) if way == "auto" else np.empty(size)
    ours[...] = comm.rank
    given, native = np.full(10, 1.0), np.zeros(10)
    named = None if way == "auto" else "native"
    other = comm.Allreduce_init(given, native, algorithm=named)
    plan = comm.Allreduce_init(MPI.IN_PLACE, ours, algorithm=None if way == "auto" else "ring")
    plan.Start()
    for turn in range(2):
        if turn:
            plan.Start()
        if comm.rank:
            plan.Wait()
        if way == "run":
            other()
        elif way == "blocking":
            comm.Allreduce(given, native, algorithm="native")
        elif way == "nonblocking":
            comm.Iallreduce(given, native, algorithm="native").Wait()
        else:
            other.Start()
            other.Wait()
        plan.Wait()
        assert (native == comm.size).all()
    assert (ours == total(comm) * comm.size).all()
    other.Free()
    plan.Free()


class Slow:
    """Is done when it has been moved along ten times."""

    turns, gone = 0, False

    def Test(self):
        self.turns += 1
        return self.turns > 10

    def abandon(self):
        self.gone = True


@two_or_more
def test_the_librarys_own_begins_when_what_is_attended_is_done(comm):
    slow = Slow()
    leave_alone = comm.attend(slow)
    comm.Allreduce(np.ones(3), found := np.zeros(3), algorithm="native")
    assert slow.turns > 10 and (found == comm.size).all()
    comm.Barrier()
    leave_alone()
    assert not comm.Dup().Free() and not slow.gone


def test_what_is_attended_is_done_when_its_communicator_is_closed_and_not_given_up():
    slow = Slow()
    with Communicator(MPI.COMM_WORLD) as comm:
        leave_alone = comm.attend(slow)
    assert slow.turns > 10 and not slow.gone
    leave_alone()
    assert slow not in comm._engine.progress.here


@two_or_more
def test_a_plan_goes_on_while_its_rank_makes_a_communicator_or_waits_for_a_message(comm):
    """Or is in another communicator's collective, where the others come later."""
    items, other = np.zeros(50_000), Communicator(MPI.COMM_WORLD)

    def made(way, *given):
        return [lambda: (found := getattr(comm, way)(*given)) and found.Free()] * 2

    def elsewhere(algorithm):
        return [lambda: expect_sum(other, np.zeros(50_000), algorithm)] * 2

    def exchanged(peer):
        comm.Sendrecv(np.ones(3), peer, recvbuf=np.ones(3), source=peer)

    calls = (
        *map(made, ("Split", "Dup", "Clone", "barrier")),
        made("Create", comm.Get_group()),
        made("Split_type", MPI.COMM_TYPE_SHARED),
        *map(elsewhere, ("ring", "butterfly")),
        (lambda: comm.recv(source=1), lambda: comm.send("x", 0)),
        (lambda: comm.Recv(np.zeros(3), 1), lambda: comm.Send(np.ones(3), 0)),
        (lambda: comm.Ssend(np.ones(3), 1), lambda: comm.Recv(np.zeros(3), 0)),
        (lambda: comm.ssend("x", 1), lambda: comm.recv(source=0)),
        (lambda: comm.sendrecv("x", 1, source=1), lambda: comm.sendrecv("y", 0, source=0)),
        (lambda: exchanged(1), lambda: exchanged(0)),
        (lambda: comm.Mprobe(1).Recv(np.zeros(3)), lambda: comm.Send(np.ones(3), 0)),
        (lambda: comm.mprobe(1).recv(), lambda: comm.send("x", 0)),
        (lambda: comm.probe(1) and comm.recv(source=1), lambda: comm.send("x", 0)),
    )
    for before, after in calls:
        items[...] = comm.rank
        plan = comm.Iallreduce(MPI.IN_PLACE, items, algorithm="ring")
        if comm.rank == 0:
            before()
        plan.Wait()
        if comm.rank == 1 or (comm.rank and before is after):
            after()
        assert (items == total(comm)).all()
    other.close()


@two_or_more
@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_a_plan_under_way_is_not_freed_nor_started(comm, algorithm):
    plan = comm.Allreduce_init(np.ones(50_000), np.zeros(50_000), algorithm=algorithm)
    if comm.rank == 0:
        plan.Start()
        with pytest.raises(RuntimeError, match="under way; Wait for it before Free"):
            plan.Free()
        with pytest.raises(RuntimeError, match="without Wait or a true Test"):
            plan.Start()
    MPI.COMM_WORLD.bcast(None)  # the others start later
    if comm.rank:
        plan.Start()
    plan.Wait()
    plan.Free()
    for act in (plan.Start, plan):
        with pytest.raises(RuntimeError, match="was freed; make another one"):
            act()
    comm.Barrier()


def test_a_communicator_that_closes_ends_its_plans():
    comm = Communicator(MPI.COMM_WORLD)
    items = np.full(50_000, comm.rank)
    comm.Iallreduce(MPI.IN_PLACE, items, algorithm="ring")
    comm.close()
    assert (items == total(comm)).all()


def test_a_communicator_that_was_freed_says_so():
    for algorithm in ("auto", "native", "ring"):
        with Communicator(MPI.COMM_WORLD) as comm:
            made = comm.Dup()
            made.Allreduce(np.ones(3), np.zeros(3), algorithm="ring")
            plan = made.Allreduce_init(np.ones(3), np.zeros(3), algorithm="native")
            made.Free()
            with pytest.raises(MPI.Exception):
                made.Allreduce(np.ones(3), np.zeros(3), algorithm=algorithm)
            with pytest.raises(MPI.Exception):
                plan.Start()


@two_or_more
def test_different_calls_that_meet_in_shared_memory_are_an_error(comm):
    """Without ``check``: a rank would read and store behind another's array."""
    short, long = comm.empty(4000), comm.empty(8000)
    usual, is_last = (short, MPI.SUM, "direct"), comm.rank == comm.size - 1
    others = {
        "4000 x float64 .* 8000 x": (long, MPI.SUM, "direct"),
        "SUM .* MAX": (short, MPI.MAX, "direct"),
        "direct.* by ring": (short, MPI.SUM, "ring"),
        "allreduce .* broadcast": None,
    }
    for call in (comm.Allreduce, comm.Iallreduce):
        expect_sum(comm, short, "direct")
        for sentence, other in others.items():
            with pytest.raises(MismatchError, match=sentence):
                if is_last and other is None:
                    comm.Bcast(short, algorithm="chain")
                items, op, algorithm = other if is_last else usual
                call(MPI.IN_PLACE, items, op, algorithm=algorithm)
    expect_sum(comm, long, "direct")


NO_SHAPES = [-1, (2, -3), 2**61, 2**70, (2**40, 2**40), "x", 1.5, [None]]
NO_SHAPES += [(0, 2**70), (0, 2**40, 2**40), (1,) * 65, (0, *(1,) * 65)]
NO_ARRAYS = [*((shape, "f8") for shape in NO_SHAPES), (10, "(2,"), (10, "O"), (10, "nothing")]


@pytest.mark.parametrize("given", NO_ARRAYS)
def test_memory_that_one_rank_asks_for_in_vain(comm, given):
    with pytest.raises(InvalidBuffer, match=f"rank {comm.size - 1}: "):
        comm.empty(*(given if comm.rank == comm.size - 1 else (10, "f8")))
    assert comm.empty(10).size == 10


@two_or_more
def test_arrays_of_the_node_take_no_descriptors(comm):
    before = len(os.listdir("/proc/self/fd"))
    kept = [comm.empty(10) for _ in range(100)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for items in kept[::25]:
        expect_sum(comm, items, "direct")


@two_or_more
def test_a_forked_child_cannot_take_part_in_a_collective_nor_give_memory_back(comm):
    """Its calls would move the counters of its parent on, whose next sums would be wrong."""
    shared, plain, kept = comm.empty(5000), np.ones(10), [comm.empty(5000)]
    kept[0][...] = comm.rank + 1
    started = comm.Allreduce_init(MPI.IN_PLACE, shared, algorithm="direct")
    calls = (
        lambda: comm.Allreduce(MPI.IN_PLACE, shared, algorithm="direct"),
        lambda: comm.Allreduce(MPI.IN_PLACE, plain, algorithm="ring"),
        lambda: comm.Iallreduce(MPI.IN_PLACE, np.ones(3), algorithm="ring"),
        started.Start,
        # These the MPI library would take for its parent's.
        lambda: comm.Allreduce(MPI.IN_PLACE, np.ones(3)),
        lambda: comm.Iallreduce(MPI.IN_PLACE, np.ones(3)),
        lambda: comm.allreduce(1),
        comm.Barrier,
        comm.Dup,
        lambda: Communicator(MPI.COMM_WORLD),
    )
    comm.Allreduce(MPI.IN_PLACE, np.ones(3))
    expect_sum(comm, shared, "direct")
    expect_sum(comm, plain, "ring")
    assert refused_in_child((kept.clear, gc.collect, *calls)) == len(calls)
    assert (kept[0] == comm.rank + 1).all()
    expect_sum(comm, kept[0], "direct")
    for turn in range(20):
        expect_sum(comm, shared, "direct", plus=turn)
        expect_sum(comm, plain, "ring", plus=turn)
    started.Free()


@two_or_more
def test_arrays_that_only_some_ranks_have_dropped(comm):
    """Its memory is given back, and the others' stays readable."""
    first, second = comm.empty(5000), comm.empty(5000)
    for turn in range(6):
        expect_sum(comm, second if comm.rank or turn < 2 else first, "direct", plus=turn)
        if turn == 3 and comm.rank:
            del first
        if turn == 4:
            expect_sum(comm, comm.empty(5000), "direct")
