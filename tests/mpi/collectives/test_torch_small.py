"""Small calls of ``torch.distributed``, the roots that they name, and groups of threads."""

import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.errors import MismatchError
from collectives.torch.backend import backend_of
from collectives.torch.order import CollectiveWork
from tests.mpi.collectives.forms import LAST, RANK, P, refused_in_child

pytestmark = [pytest.mark.quick_on(3), pytest.mark.usefixtures("world")]
two_or_more = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("items", [1, 40_000])
def test_all_ranks_gather_in_place_or_none_does(group, items, monkeypatch):
    """MPI wants it so; an input may lie in its output on some ranks alone."""
    gather, made = Communicator.Allgather, []

    def noted(self, sent, received, **how):
        made.append(sent is MPI.IN_PLACE)
        gather(self, sent, received, **how)

    monkeypatch.setattr(Communicator, "Allgather", noted)
    for block in (0, RANK):
        whole, source = torch.zeros(P * items), torch.full((items,), 1.0 * RANK)
        if RANK == LAST:
            source = whole[block * items :][:items].fill_(RANK)
        dist.all_gather_into_tensor(whole, source, group)
        assert torch.equal(whole, torch.arange(1.0 * P).repeat_interleave(items))
    assert all(one == [items > 1] * len(one) for one in MPI.COMM_WORLD.allgather(made))


def test_calls_are_numbered_with_their_roots_for_the_watchdog(group):
    dist.broadcast(torch.ones(1), LAST, group)
    dist.barrier(group)
    lines = str(backend_of(group).watchdog.calls).splitlines()
    assert f"#1 broadcast with root {LAST}" in lines[-2] and "#2 barrier" in lines[-1]


@two_or_more
@pytest.mark.parametrize("meets", ["barrier", "large sum", "end"])
def test_other_roots_on_the_ranks_are_an_error_where_they_meet(meets):
    group = dist.new_group()
    dist.broadcast(torch.ones(2), LAST, group)
    dist.broadcast(torch.ones(2), RANK, group)  # each rank is its own root, and waits for nobody
    with pytest.raises(MismatchError, match="other roots on some ranks"):
        if meets == "barrier":
            dist.barrier(group)
        elif meets == "large sum":
            dist.all_reduce(torch.ones(50_000), group=group)
        else:
            dist.destroy_process_group(group)
    # Messages are left that a later broadcast would receive.
    for again in () if meets == "end" else (dist.barrier, dist.destroy_process_group):
        with pytest.raises(MismatchError, match="new group"):
            again(group)
    others = [dist.new_group() for _ in range(3)]
    for other in others:
        for root in range(P):
            dist.broadcast(tensor := torch.full((5,), 1.0 * RANK), root, other)
            assert tensor.tolist() == [root] * 5
        dist.destroy_process_group(other)


@two_or_more
def test_a_message_that_nobody_received_is_not_the_next_group_s():
    for value in (7.0, 1.0):
        group, received = dist.new_group(), torch.ones(2)
        if RANK == 0:
            dist.isend(torch.full((2,), value), LAST, group)
        elif RANK == LAST and value == 1:
            dist.recv(received.zero_(), 0, group)
        assert received.tolist() == [1] * 2
        dist.destroy_process_group(group)


def test_large_messages_that_nobody_receives_do_not_hold_up_the_end_of_their_group():
    group = dist.new_group()
    for other in {0, LAST} - {RANK}:
        dist.isend(torch.ones(1 << 20), other, group)
    dist.destroy_process_group(group)


def test_an_interrupt_in_a_wait_leaves_no_call_that_never_ends(group):
    backend, interrupted = backend_of(group), Mock(side_effect=KeyboardInterrupt)
    record, order = backend.watchdog.calls.record, backend.order
    order.calls.append(work := CollectiveWork(order, [], [], record, "interrupted", interrupted))
    future = work.get_future()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    assert work.is_completed() and not work.is_success() and future.done()
    dist.all_reduce(tensor := torch.ones(1), group=group)
    assert tensor.item() == P


def test_a_process_that_was_forked_is_no_rank(group):
    """Its calls would take its parent's messages, and its parent's memory."""
    calls = [
        lambda: dist.all_reduce(torch.ones(3), group=group),
        lambda: dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait(),
        lambda: group.send([torch.ones(1)], RANK, 0),
        lambda: dist.irecv(torch.ones(1), None, group),
        lambda: backend_of(group).monitored_barrier(),
        dist.new_group,
    ]
    dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait()
    assert refused_in_child([*calls, backend_of(group).shutdown]) == len(calls)
    dist.all_reduce(tensor := torch.ones(3), group=group)
    assert tensor.tolist() == [P] * 3


def test_threads_have_groups_of_their_own():
    made = [dist.new_group() for _ in range(3)]

    def train(number):
        tensor = torch.empty(5)
        for turn in range(200):
            work = dist.all_reduce(tensor.fill_(turn), group=made[number], async_op=turn % 2 == 0)
            if work is not None:
                work.wait()
            dist.broadcast(tensor, turn % P, made[number])
            assert tensor.tolist() == [turn * P] * 5

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(train, range(3)))
    for group in made:
        dist.barrier(group)
        dist.destroy_process_group(group)


@two_or_more
def test_a_wait_ends_with_its_call_though_the_next_one_is_under_way(group):
    """The group's thread goes on to the next call, which another rank begins after a message."""
    for turn in range(5):
        first, second, word = torch.ones(2), torch.ones(300_000), torch.zeros(1)
        if RANK == LAST:
            time.sleep(0.03)  # the others' threads are in the first sum
            dist.all_reduce(first, group=group)
            dist.recv(word, 0, group)
            dist.all_reduce(second, group=group)
        else:
            works = [dist.all_reduce(t, group=group, async_op=True) for t in (first, second)]
            works[0].get_future()  # wakes the thread
            time.sleep(0.01)
            works[0].wait()
            if RANK == 0:
                dist.send(torch.full((1,), float(turn)), LAST, group)
            works[1].wait()
        assert first.tolist() == [P] * 2 and second[-1] == P
        assert RANK < LAST or word.item() == turn


def test_the_thread_of_a_group_sleeps_again_and_again(group):
    """Else it would take the interpreter from the program, some thousand times a second."""
    order = backend_of(group).order
    for _ in range(3 if order.has_thread else 0):
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        deadline = time.monotonic() + 20
        while not order._is_asleep:
            assert time.monotonic() < deadline, "the thread still looks for calls"
            time.sleep(1e-3)
