"""Bytes counted where messages start, against closed forms and against the schedule."""

from math import log2

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import build, names
from collectives.coded import Coding, TwoPhase
from collectives.compile.cost import count
from collectives.sparse import SparseAllreduce, sparse_allreduce
from tests.mpi.collectives.forms import P
from tests.mpi.collectives.test_coded import Steps

LENGTHS = (0, 1, max(1, P - 1), 30 * P, 30 * P + 7)


@pytest.fixture
def counting():
    with Communicator(MPI.COMM_WORLD) as comm:
        yield comm, comm.count_traffic()


def all_sent(n, algorithm):
    """Bytes per byte of the buffer that all ranks together send."""
    if algorithm != "butterfly":
        return 2 * (P - 1) * n  # each byte to every other rank and back, at least
    doubled = 1 << int(log2(P))
    return (doubled * int(log2(P)) + 2 * (P - doubled)) * n


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("algorithm", names("allreduce"))
def test_an_all_reduce_sends_what_its_formula_says(counting, algorithm, n):
    comm, traffic = counting
    x = np.ones(n, np.float32)
    plan = comm.Allreduce_init(MPI.IN_PLACE, x, algorithm=algorithm)
    for _ in range(2):
        plan()
    if algorithm != "leaders":  # whose butterfly within nodes depends on how many ranks they have
        assert comm.allreduce(traffic.sent) == 2 * all_sent(x.nbytes, algorithm)
    assert comm.allreduce(traffic.shared) == comm.allreduce(traffic.native) == 0
    schedule = build("allreduce", algorithm, P)
    if n % (P * schedule.chunks) == 0 and n:
        assert comm.allreduce(traffic.sent, MPI.MAX) == 2 * round(count(schedule).sent * x.nbytes)
    plan.Free()


def test_shared_memory_and_native_have_their_own_columns(counting):
    comm, traffic = counting
    x = comm.empty(1000, np.float64)
    traffic = comm.count_traffic()
    comm.Allreduce(MPI.IN_PLACE, x, algorithm="direct")
    assert traffic.sent == 0
    # Each byte is loaded from every other rank by its owner, and stored back.
    assert comm.allreduce(traffic.shared) == 2 * (P - 1) * x.nbytes
    comm.Allreduce(MPI.IN_PLACE, np.ones(3 * P), algorithm="native")
    plan = comm.Allreduce_init(MPI.IN_PLACE, np.ones(3 * P), algorithm="native")
    plan.Start()
    plan.Wait()
    comm.Bcast([np.ones(9), 5, MPI.DOUBLE], algorithm="native")
    comm.Barrier(algorithm="native")
    comm.Reduce_scatter(np.ones(P), np.ones(1), algorithm="native")  # counts by each rank's buffer
    assert traffic.native == 5
    # The library does not say what it sends: the least is counted.
    assert traffic.native_bytes == 2 * 2 * (P - 1) * 3 * 8


def test_communicators_made_of_one_that_counts_count_too(counting):
    comm, traffic = counting
    half = comm.Split(comm.rank % 2, comm.rank)
    half.Allreduce(MPI.IN_PLACE, np.ones(8), algorithm="ring")
    assert traffic.sent == half.traffic.sent
    assert comm.allreduce(traffic.sent) == sum(
        2 * (size - 1) * 64 for size in (-(-P // 2), P // 2) if size
    )
    assert comm.count_traffic().sent == 0
    half.Free()


def test_exact_sums_codes_and_pairs_are_counted(counting):
    comm, traffic = counting
    plan = TwoPhase(comm, Coding(Steps()), np.ones(33), np.zeros(33))
    traffic = comm.count_traffic()  # the plans of its phases count for the one before
    plan.Start()
    plan.Wait()
    assert traffic.sent == 0
    plan = TwoPhase(comm, Coding(Steps()), np.ones(33), np.zeros(33))
    plan.Start()
    plan.Wait()
    moved = traffic.sent + traffic.shared
    assert comm.allreduce(moved) == comm.allreduce(plan.sent)
    with Communicator(MPI.COMM_WORLD, reproducible=True) as exact:
        told = exact.count_traffic()
        exact.Allreduce(np.ones(5 * P), np.zeros(5 * P))
        assert exact.allreduce(told.sent) == 2 * (P - 1) * 5 * P * 8
    given, before = (np.array([comm.rank], np.uint32), np.ones(1)), traffic.sent
    sparse_allreduce(comm, *given, 10_000)
    once = traffic.sent - before
    sparse = SparseAllreduce(comm, 10_000, np.float64)
    for _ in range(3):
        sparse.give(*given)
        sparse.Start()
        sparse.Wait()
        found, total = sparse.total
        assert found.tolist() == list(range(P)) and total.tolist() == [1.0] * P
    assert traffic.sent - before == 4 * once
    assert (once > 0) == (P > 1)
    sparse.Free()
