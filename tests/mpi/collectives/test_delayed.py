"""Messages with something around them: all collectives as ever; late ones leave time to compute."""

from time import monotonic

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, Link, delayed

two_or_more = pytest.mark.mpi(min_size=2)
pytestmark = pytest.mark.quick_on(3)

#: Long enough to be seen beside what a busy machine adds.
LATENCY = 0.03


@pytest.fixture(scope="module")
def slow():
    with Communicator(MPI.COMM_WORLD, transport=delayed(Link((LATENCY, LATENCY)))) as comm:
        yield comm


@pytest.fixture(scope="module")
def soon():
    with Communicator(MPI.COMM_WORLD, transport=delayed(Link((1e-4, 3e-4), 1e9))) as comm:
        yield comm


@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_nothing_but_delayed_messages_is_chosen(soon, algorithm):
    array = soon.empty(1 << 12, np.float32)
    array[...] = 1
    soon.Allreduce(MPI.IN_PLACE, array, algorithm=algorithm)
    assert (array == soon.size).all()
    assert soon.last_plan.algorithm != "native"
    soon.Barrier()
    assert soon.last_plan.algorithm != "native"


@two_or_more
@pytest.mark.parametrize("how", ["blocking", "nonblocking", "persistent"])
@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "parameter_server"])
def test_no_message_is_early(slow, algorithm, how):
    data = np.ones(64)
    plan = slow.Allreduce_init(MPI.IN_PLACE, data, algorithm=algorithm)
    for _ in range(2):  # a persistent request waits again
        data[...] = 1
        # The last rank begins then: no message of what follows starts before.
        begin = MPI.Intracomm(slow).allreduce(monotonic(), MPI.MAX)
        if how == "blocking":
            slow.Allreduce(MPI.IN_PLACE, data, algorithm=algorithm)
        elif how == "nonblocking":
            plan.Start()
            while not plan.Test():
                pass
        else:
            plan.Start()
            plan.Wait()
        took = monotonic() - begin
        assert (data == slow.size).all()
        # The last rank's numbers, which every rank has, have travelled once at least.
        assert took >= LATENCY
    if algorithm == "ring":
        assert took >= 2 * (slow.size - 1) * LATENCY
    plan.Free()


@two_or_more
def test_ranks_compute_while_messages_are_on_their_way(monkeypatch):
    """By a clock that stands still but for the computation."""
    latency, now = 0.4, [monotonic()]
    with Communicator(MPI.COMM_WORLD, transport=delayed(Link((latency, latency)))) as comm:
        data = np.empty((comm.size, 8))
        plan = comm.Allgather_init(np.full(8, float(comm.rank)), data, algorithm="direct")
        now[0] = MPI.Intracomm(comm).bcast(now[0])
        with monkeypatch.context() as patch:
            patch.setattr("collectives.execution.transport.delayed.monotonic", lambda: now[0])
            plan.Start()
            now[0] += 1.1 * latency  # the computation
            # One round: it was on its way all the time.  Had it begun to move here, it would take
            # the latency again, and never come.
            end = monotonic() + 60
            while not plan.Test():
                assert monotonic() < end
        assert (data == np.arange(comm.size)[:, None]).all()
        plan.Free()


def test_plans_of_several_communicators_that_are_under_way_together(soon):
    other, buffers = soon.Dup(), [np.full(100, 1.0 + i) for i in range(6)]
    plans = [
        comm.Iallreduce(MPI.IN_PLACE, data, algorithm="ring")
        for comm, data in zip([soon, other] * 3, buffers)
    ]
    for plan in plans if soon.rank % 2 else plans[::-1]:  # in another order on each rank
        plan.Wait()
    for number, data in enumerate(buffers):
        assert (data == (1.0 + number) * soon.size).all()
    other.Free()
