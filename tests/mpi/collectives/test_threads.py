"""First calls in threads that have a communicator each, in another order on each rank."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError, Communicator
from tests.cases import slow_case
from tests.mpi.collectives.forms import expect_sum, expect_well

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
TOTAL = SIZE * (SIZE + 1) / 2
THREADS = 4
pytestmark = [
    pytest.mark.quick_on(2, 3),
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="MPI takes one thread"),
    pytest.mark.skipif(SIZE > 4, reason="shown on up to 4 ranks"),
]


def large(comm):
    for _ in range(3):
        expect_sum(comm, np.empty(50_000))


SETTINGS = ({}, {}, {"check": True})
KINDS = (
    lambda comm: expect_sum(comm, np.empty(1000)),
    lambda comm: expect_sum(comm, np.empty(1000), form="nonblocking"),
    lambda comm: expect_sum(comm, np.empty(1000), "ring", form="persistent"),
    lambda comm: expect_sum(comm, comm.empty(100_000)),
    lambda comm: expect_sum(comm, comm.empty(100_000), form="nonblocking"),
    large,
    Communicator.Barrier,
    lambda comm: comm.ranks_per_node,
)


@pytest.mark.parametrize("number", [16, slow_case(64)])
def test_no_thread_waits_for_another_ones_communicator(number):
    comms = [Communicator(MPI.COMM_WORLD.Dup(), **SETTINGS[n % 3]) for n in range(number)]
    start = threading.Barrier(THREADS)

    def work(thread):
        start.wait()
        draws = Random(f"{thread} {RANK}")
        time.sleep(0.05 * ((thread + RANK) % 2))
        for turn in range(2):
            for n in range(thread, len(comms), THREADS):
                time.sleep(0.003 * draws.random())
                KINDS[(n // 3 + turn) % len(KINDS)](comms[n])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    for comm in comms:
        comm.Free()


def test_first_nonblocking_calls_in_another_order_after_prepare():
    """Without it, each rank's first call would wait for the others' on that communicator."""
    comms = [Communicator(MPI.COMM_WORLD.Dup()) for _ in range(2)]
    for comm in comms:
        comm.prepare()
    for algorithm in ("ring", None):
        arrays = [np.full(1000, RANK + 1.0) for _ in comms]
        order = (0, 1) if RANK % 2 else (1, 0)
        plans = [comms[n].Iallreduce(MPI.IN_PLACE, arrays[n], algorithm=algorithm) for n in order]
        comms[0].Waitall(plans)
        assert all((array == TOTAL).all() for array in arrays)
    for comm in comms:
        comm.Free()


def test_threads_that_call_one_communicator_at_once_are_told():
    """By mistake: ranks may pair their calls in another order."""
    comm, told = Communicator(MPI.COMM_WORLD.Dup()), []

    def add(left, right, _):
        """In the middle of a call, another thread makes further ones."""
        with ThreadPoolExecutor(1) as pool:
            for call in (comm.Allreduce, comm.Iallreduce, comm.Allreduce_init):
                made = pool.submit(call, MPI.IN_PLACE, np.empty(10), algorithm="ring")
                told.append(made.exception())
            told.append(pool.submit(comm.empty, 10).exception())
        total = np.frombuffer(right)
        total += np.frombuffer(left)

    operation, array = MPI.Op.Create(add, commute=True), np.full(SIZE, RANK + 1.0)
    comm.Allreduce(MPI.IN_PLACE, array, operation, algorithm="ring")
    assert (array == TOTAL).all()
    assert told and all(isinstance(one, CollectiveError) for one in told)
    expect_well(comm)
    operation.Free()
    comm.Free()
