"""Requests that a nonblocking call returns, beside mpi4py's."""

import time
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.execution import waiting
from tests.mpi.collectives.forms import LAST, LEFT, RANK, RIGHT, P, tuned

pytestmark = pytest.mark.quick_on(2, 3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("exchange", [False, True])
def test_a_receive_that_is_given_up_writes_nothing_later(monkeypatch, exchange):
    """Nor does it take the message of the next one."""
    world, given_up, found = MPI.COMM_WORLD, np.zeros(3), np.zeros(3)
    with Communicator(world) as comm:
        comm.prepare()
        if comm.rank == 0:
            plan = comm.Iallreduce(MPI.IN_PLACE, np.ones(5), algorithm="ring")
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(comm._engine.progress, "advance", Mock(side_effect=KeyboardInterrupt))
                if exchange:
                    comm.Sendrecv(np.ones(1 << 17), 1, 5, given_up, 1, 7)
                else:
                    comm.Recv(given_up, 1, 7)
        world.Barrier()
        if comm.rank > 0:
            plan = comm.Iallreduce(MPI.IN_PLACE, np.ones(5), algorithm="ring")
        if comm.rank == 1:
            comm.Send(np.full(3, 7.0), 0, 7)
            if exchange:
                sent = np.zeros(1 << 17)
                comm.Recv(sent, 0, 5)
                assert (sent == 1).all()
        if comm.rank == 0:
            comm.Recv(found, 1, 7)
            assert (found == 7).all() and not given_up.any()
        plan.Wait()


@pytest.mark.mpi(min_size=2)
def test_ranks_with_plans_under_way_and_others_leave_the_same_calls_to_the_library(tmp_path):
    """Where ordinary arrays go through slots earlier than shared ones go by plans of ours."""
    table = tuned(tmp_path, ("numpy", "butterfly", 1 << 15), ("shared", "direct", 1 << 18))
    with Communicator(MPI.COMM_WORLD, tuning=table) as comm:
        comm.empty(16)
        total, other = np.zeros(8192), Mock(Test=lambda: False)
        comm.Iallreduce(np.ones(8192), total).Wait()
        if comm.rank > 0:
            comm._engine.progress.add(other)
        request = comm.Iallreduce(np.ones(8192), total)
        comm._engine.progress.remove(other)
        request.Wait()
        assert (total == comm.size).all()


@pytest.fixture(params=["plain", "counted", "watched"])
def comm(request):
    timeout = 100 if request.param == "watched" else None
    with Communicator(MPI.COMM_WORLD, timeout=timeout) as communicator:
        if request.param == "counted":
            communicator.count_traffic()
        yield communicator


def started(comm):
    """Requests of four kinds, and what says whether all of them have done their work."""
    sent, total, passed = np.full(5, RANK + 1.0), np.zeros(5), np.zeros(5)
    every, root, ranks = np.zeros(5 * P), np.full(3, float(RANK)), np.arange(1.0, P + 1)
    requests = [
        comm.Irecv(passed, LEFT),
        comm.Iallreduce(sent, total),
        comm.Iallgather(sent, every),
        comm.Isend(sent, RIGHT),
        comm.Ibcast(root, LAST),
        comm.Ibarrier(),
    ]

    def are_right():
        found = (passed, LEFT + 1), (total, ranks.sum()), (every, ranks.repeat(5)), (root, LAST)
        return all((one == wanted).all() for one, wanted in found)

    return requests, are_right


def test_all_are_waited_for_together(comm):
    for _ in range(3):
        requests, are_right = started(comm)
        assert MPI.Request.Waitall(requests)
        assert are_right()
        assert all(request == MPI.REQUEST_NULL for request in requests)
        assert all(request.Test() and request.Wait() for request in requests)


def test_in_whatever_order_they_end(comm):
    requests, are_right = started(comm)
    left = set(range(len(requests)))
    left.remove(MPI.Request.Waitany(requests))
    left -= set(MPI.Request.Waitsome(requests) or ())
    while left:
        left -= set(MPI.Request.Testsome(requests) or ())
    assert MPI.Request.Testall(requests)
    assert are_right()


def test_with_a_status_and_in_small_letters(comm):
    x, y = np.ones(3), np.zeros(3)
    status = MPI.Status()
    assert comm.Iallreduce(x, y).Wait(status) is True
    assert status.Get_error() == MPI.SUCCESS
    assert (y == comm.size).all()
    assert comm.Iallreduce(x, y).wait() is None
    request = comm.Iallreduce(x, y)
    while not request.test()[0]:
        pass
    assert request.test() == (True, None)


def test_it_is_a_plan_for_one_run(comm):
    x, y = np.ones(3), np.zeros(3)
    request = comm.Iallreduce(x, y)
    assert isinstance(request, MPI.Request)
    assert (request.algorithm, request.collective) == ("native", "allreduce")
    assert request.reason
    if request != MPI.REQUEST_NULL:
        with pytest.raises(RuntimeError, match="is under way; Wait for it before Free"):
            request.Free()
    request.Wait()
    request.Free()
    with pytest.raises(RuntimeError, match="for one run; make another one"):
        request.Start()


def test_buffers_and_types_stay_until_it_has_ended(comm):
    x, y = np.arange(100_000.0), np.zeros(100_000)
    pairs = MPI.DOUBLE.Create_contiguous(2).Commit()
    request = comm.Ibcast([x if comm.rank == 0 else y, 50_000, pairs], 0)
    pairs.Free()
    kept = comm.Iallreduce(np.ones(300_000), np.zeros(300_000))
    others = [np.full(300_000, 5.0) for _ in range(3)]
    MPI.Request.Waitall([request, kept])
    assert all((other == 5).all() for other in others)
    assert comm.rank == 0 or (y == x).all()


@pytest.mark.parametrize("algorithms", [("ring", "native"), ("native",), ("butterfly", "ring")])
def test_plans_and_requests_together(comm, algorithms):
    """Each rank waits for them in another order."""
    items = [np.zeros(1000) for _ in algorithms]
    passed, mine = np.zeros(3), np.full(3, float(RANK))
    plans = [
        *(comm.Allreduce_init(MPI.IN_PLACE, x, algorithm=a) for x, a in zip(items, algorithms)),
        comm.Send_init(mine, RIGHT),
        comm.Recv_init(passed, LEFT),
    ]
    for turn in range(3):
        for x in items:
            x[...] = comm.rank + turn
        comm.Startall(plans)
        if turn:
            comm.Waitall(plans[comm.rank % 2 :: 2])
        while turn < 2 and not comm.Testall(plans):
            pass
        comm.Waitall(plans[::-1])
        ranks = sum(range(P)) + P * turn
        assert all((x == ranks).all() for x in items) and (passed == LEFT).all()
    for plan in plans:
        plan.Free()
    begun = [comm.Iallreduce(MPI.IN_PLACE, x, algorithm=a) for x, a in zip(items, algorithms)]
    comm.Waitall(iter([*begun, comm.Isend(mine, RIGHT), comm.Irecv(passed, LEFT)]))
    assert comm.Testall([]) and all((x == ranks * P).all() for x in items)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_waits_for_a_long_message_gives_its_core_away(comm, monkeypatch):
    looks, give_way = [], waiting.give_way
    monkeypatch.setattr(waiting, "give_way", lambda: looks.append(give_way()))
    for items, gives in ((1, False), (1 << 18, True)):
        sent = np.full(items, comm.rank + 1.0)
        comm.Barrier()
        looks.clear()
        if comm.rank == 0:
            time.sleep(0.1)
        # Blocks of a v-variant are messages on one node, too.
        total, counts = np.zeros(items * comm.size), [items] * comm.size
        comm.Allgatherv(sent, [total, counts], algorithm="ring")
        assert (total == np.repeat(np.arange(comm.size) + 1.0, items)).all()
        if comm.rank == 1:
            assert bool(looks) == gives
