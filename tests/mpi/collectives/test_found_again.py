"""Calls on the same shared memory as before, which take the plan of before."""

import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI

from collectives.calls.bind import Binder
from collectives.calls.validate import Validator
from tests.mpi.collectives.forms import FORMS, by_address, expect_sum, fresh, run, total

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.quick_on(2, 3)]
comm = pytest.fixture(fresh)


@pytest.fixture
def bound(monkeypatch):
    """The calls that are bound in a test."""
    calls, bind = [], Binder.bind

    def noted(self, call, *rest, **named):
        calls.append(call.algorithm)
        return bind(self, call, *rest, **named)

    monkeypatch.setattr(Binder, "bind", noted)
    return calls


def test_the_plan_is_found_again_and_the_old_request_stays_ended(comm, bound):
    array, requests = comm.empty(3000), []
    for turn in range(4):
        array[:] = comm.rank + turn
        requests.append(comm.Iallreduce(MPI.IN_PLACE, array, algorithm="direct"))
        for earlier in requests[:-1]:
            assert earlier.Test() and not earlier.is_underway
            earlier.Wait()
        requests[-1].Wait()
        assert (array == total(comm) + turn * comm.size).all()
    assert len(bound) == 1


def test_all_ranks_bind_anew_where_one_has_other_memory(comm, bound):
    here, there = comm.empty(100), comm.empty(100)
    for turn in range(6):
        array = there if comm.rank == 0 and turn in (2, 3) else here
        expect_sum(comm, array, "direct", form="nonblocking")
    assert len(bound) == 3


@pytest.mark.parametrize("form", FORMS[:2])
def test_calls_on_known_memory_are_not_parsed(comm, monkeypatch, form):
    """Whatever object names the memory; a type that is named is another call."""
    array = comm.empty(100)
    memory = by_address(array)
    specs = (array, array[:], np.frombuffer(memory), [memory, MPI.DOUBLE], [memory, MPI.DOUBLE])
    parsed, parse = [], Validator.call
    monkeypatch.setattr(
        Validator, "call", lambda self, *given: parsed.append(1) or parse(self, *given)
    )
    for spec in specs:
        array[:] = comm.rank
        run(comm, form, "Allreduce", MPI.IN_PLACE, spec, algorithm="direct")
        assert (array == total(comm)).all()
    assert len(parsed) == 2


def test_other_calls_on_the_same_memory_have_plans_of_their_own(comm, bound):
    array = comm.empty(100)
    for _ in range(3):
        for op, expected in ((MPI.SUM, total(comm)), (MPI.MAX, comm.size - 1)):
            array[:] = comm.rank
            comm.Iallreduce(MPI.IN_PLACE, array, op=op, algorithm="direct").Wait()
            assert (array == expected).all()
        for root in range(2):
            array[:] = comm.rank
            comm.Ibcast(array, root=root, algorithm="binomial_tree").Wait()
            assert (array == root).all()
    assert len(bound) == 4


def test_a_plan_that_is_kept_keeps_no_array_and_one_under_way_does(comm):
    array = comm.empty(50_000)
    array[:] = comm.rank
    gone = weakref.ref(array)
    request = comm.Iallreduce(MPI.IN_PLACE, array, algorithm="direct")
    del array
    gc.collect()
    assert gone() is not None
    request.Wait()
    del request
    comm._engine.last_plan = None
    gc.collect()
    assert gone() is None


def test_two_at_once_that_send_the_same_array(comm):
    """The plan of the first is under way and cannot serve the second, which is the same call on
    ranks that receive nothing."""
    sent, results = comm.empty(100), comm.empty((2, 100))
    for _ in range(3):
        sent[:] = comm.rank
        requests = [
            comm.Ireduce(sent, None if comm.rank else each, algorithm="direct") for each in results
        ]
        for request in requests[::-1]:
            request.Wait()
        assert comm.rank or (results == total(comm)).all()
