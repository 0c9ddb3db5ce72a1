"""Calls that ``auto`` leaves to the MPI library unread: in any form, the ranks in different ones,
before and after there is memory that they share."""

import array
import mmap
import sys
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.calls import fast_path
from collectives.calls.mpi4py_spec import TYPES
from tests.mpi.collectives.forms import FORMS, by_address, expect_sum, fresh, run

comm = pytest.fixture(fresh)


def test_memory_by_address_and_nonblocking_calls_are_not_read(comm):
    numbers = np.ones(2, np.float32)
    for spec, words, form in product(
        (by_address(numbers), numbers), ((MPI.FLOAT,), (2, MPI.FLOAT)), FORMS[:2]
    ):
        comm.Bcast(numbers, algorithm="binomial_tree")
        run(comm, form, "Allreduce", MPI.IN_PLACE, [spec, *words])
        assert comm.last_plan is fast_path.LEFT_TO_NATIVE
    assert (numbers == comm.size**8).all()


def test_native_by_name_is_not_read(comm):
    mine, total = np.full(3, comm.rank + 1.0), np.zeros(3)
    comm.Allreduce(mine, total, algorithm="native")
    assert (total == comm.size * (comm.size + 1) / 2).all()
    assert comm.last_plan is fast_path.ASKED_FOR
    with Communicator(MPI.COMM_WORLD, algorithm="native") as always:
        always.Bcast(mine)
        assert (mine == 1).all() and always.last_plan is fast_path.ASKED_FOR
    with Communicator(MPI.COMM_WORLD, check=True) as checked:
        checked.Bcast(total, algorithm="native")
        assert checked.last_plan is not fast_path.ASKED_FOR


@pytest.mark.mpi(min_size=2)
def test_from_the_first_shared_array_on_calls_are_read(comm):
    ordinary = np.ones(6 << 10)
    comm.Allreduce(MPI.IN_PLACE, ordinary)
    assert comm.last_plan is fast_path.LEFT_TO_NATIVE
    expect_sum(comm, comm.empty(ordinary.size))
    on_one_node = comm.ranks_per_node == comm.size
    assert not on_one_node or comm.last_plan.algorithm != "native"
    comm.Allreduce(MPI.IN_PLACE, ordinary)
    assert comm.last_plan.algorithm == "native" and np.all(ordinary == comm.size**2)
    assert comm.last_plan is not fast_path.LEFT_TO_NATIVE
    comm.close()
    comm.Allreduce(MPI.IN_PLACE, ordinary)
    assert comm.last_plan is fast_path.LEFT_TO_NATIVE


@pytest.mark.parametrize("items", [10, 20_000])
@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("method", ["Scatter", "Gather"])
def test_a_root_in_place_reads_a_call_as_the_others_do(comm, method, form, items):
    """mpi4py's ``IN_PLACE`` is a buffer of no bytes."""
    comm.empty(1)
    for root in range(comm.size):
        at_root = comm.rank == root
        whole = np.arange(float(items * comm.size))
        own = whole[items * comm.rank :][:items] * (method == "Gather")
        given = [whole if at_root else None, MPI.IN_PLACE if at_root else own]
        run(comm, form, method, *(given if method == "Scatter" else given[::-1]), root=root)
        assert np.array_equal(whole, np.arange(float(items * comm.size)))
        assert at_root or np.array_equal(own, np.split(whole, comm.size)[comm.rank])


@pytest.mark.parametrize("method", ["Allreduce", "Scan", "Bcast", "Alltoallv"])
def test_a_plan_under_way_is_read_around(comm, method):
    """MPI's blocking collectives match no plan of ours, whose ranks end it first."""
    sums = np.ones(5)
    request = comm.Iallreduce(MPI.IN_PLACE, sums, algorithm="ring")
    found = []
    for on in (comm, MPI.COMM_WORLD):
        given = [np.arange(2.0 * comm.size) + comm.rank for _ in range(2)]
        getattr(on, method)(*given[method == "Bcast" :])
        found.append(given[1])
    np.testing.assert_array_equal(*found)
    request.Wait()
    assert np.all(sums == comm.size)


def test_pythons_own_memory_and_barriers_are_not_read(comm):
    letters = bytearray(b"abc" if comm.rank == 0 else 3)
    comm.Bcast(letters)
    assert comm.last_plan is fast_path.LEFT_TO_NATIVE and letters == b"abc"
    numbers = array.array("d", [comm.rank] * 2)
    comm.Allreduce(MPI.IN_PLACE, numbers)
    assert comm.last_plan is fast_path.LEFT_TO_NATIVE
    assert list(numbers) == [comm.size * (comm.size - 1) / 2] * 2
    comm.Bcast(np.zeros(1), algorithm="binomial_tree")
    comm.Barrier()
    assert comm.last_plan is fast_path.LEFT_TO_NATIVE


@pytest.mark.parametrize(
    "make", [lambda: np.zeros(1), lambda: bytearray(8), lambda: mmap.mmap(-1, 8)]
)
def test_a_buffer_with_count_and_type_is_read_in_one_python_call(comm, make):
    given = [make(), 1, MPI.DOUBLE], (make(), 1, MPI.DOUBLE)
    comm.Allreduce(*given)
    calls = []
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    comm.Allreduce(*given)
    sys.setprofile(None)
    assert comm.last_plan is fast_path.LEFT_TO_NATIVE
    assert calls == ["Allreduce", "leaves_to_native", "nbytes_of", "nbytes_of"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("settings", [{"check": True}, {"timeout": 60}, {"reproducible": True}])
def test_settings_that_concern_each_call_read_it(settings):
    with Communicator(MPI.COMM_WORLD, **settings) as comm:
        comm.Allreduce(np.ones(3), np.zeros(3))
        assert comm.last_plan is not fast_path.LEFT_TO_NATIVE


def test_what_is_no_array_of_mpi_types_is_read(comm):
    records = np.full(3, comm.rank, [("a", "i4"), ("b", "f8")])
    comm.Bcast(records)
    assert comm.last_plan is not fast_path.LEFT_TO_NATIVE and not records["b"].any()
    swapped = np.full(3, comm.rank, ">f8")
    comm.Bcast(swapped)
    assert comm.last_plan is not fast_path.LEFT_TO_NATIVE and not swapped.any()
    vector, spread = MPI.DOUBLE.Create_vector(2, 1, 2).Commit(), np.full(4, float(comm.rank))
    comm.Bcast([spread, 1, vector])
    assert comm.last_plan is not fast_path.LEFT_TO_NATIVE
    assert list(spread) == [0.0, comm.rank, 0.0, comm.rank]
    vector.Free()


def test_two_ranks_leave_sums_of_16_bits_to_the_library(comm):
    """It rounds their sum once, as ours does; those of more ranks it rounds with every rank."""
    if np.dtype(np.float16) not in fast_path.DTYPES:
        pytest.skip("this MPI has no such type")
    ones, total = np.ones(3, np.float16), np.zeros(3, np.float16)
    views = memoryview(ones), memoryview(total)
    for given in ((ones, total), ([ones, 3, TYPES["e"]], [total, 3, TYPES["e"]]), views):
        comm.Allreduce(*given)
        assert (total == comm.size).all()
        assert (comm.last_plan is fast_path.LEFT_TO_NATIVE) == (comm.size <= 2)


@pytest.mark.parametrize(
    ("settings", "begin"),
    [("auto", Communicator.Ibarrier),
     ("native", lambda comm: comm.Iallreduce(np.ones(3), np.empty(3)))],
)  # fmt: skip
def test_ranks_begin_a_native_call_alike_whose_plans_have_ended_and_whose_have_not(settings, begin):
    """A rank without plans under way leaves such a call to the library before it is parsed."""
    with Communicator(MPI.COMM_WORLD, algorithm=settings) as comm:
        comm.empty(1, np.uint8)
        reduction = comm.Iallreduce(np.ones(50_000), found := np.empty(50_000), algorithm="ring")
        if comm.rank == 0:
            reduction.Wait()
        begin(comm).Wait()
        reduction.Wait()
        assert (found == comm.size).all()
