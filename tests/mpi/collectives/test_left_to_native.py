"""Calls that ``auto`` leaves to the MPI library unread: in any form, the ranks in different ones,
before and after there is memory that they share."""

import array
import mmap

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.calls import fast_path
from collectives.calls.mpi4py_spec import TYPES
from tests.mpi.collectives.forms import FORMS, by_address, expect_sum, fresh, run

comm = pytest.fixture(fresh)
#: It stays where a test names its address.
MEMORY = np.zeros(2)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize(
    "spec",
    [
        MEMORY, bytearray(16), array.array("d", [0, 0]), [mmap.mmap(-1, 16), 2, MPI.DOUBLE],
        (MEMORY, MPI.DOUBLE), [by_address(MEMORY), MPI.DOUBLE],
        [by_address(MEMORY), 2, MPI.DOUBLE],
    ],
    ids=lambda spec: type(spec).__name__,
)  # fmt: skip
def test_ordinary_memory_is_not_read(comm, spec, form):
    memory = np.frombuffer(spec[0] if type(spec) in (list, tuple) else spec)
    memory[...] = comm.rank + 1
    comm.Bcast(np.zeros(1), algorithm="binomial_tree")
    run(comm, form, "Bcast", spec)
    assert comm.last_plan is fast_path.LEFT_TO_NATIVE and (memory == 1).all()


def test_native_by_name_is_not_read(comm):
    mine, total = np.full(3, comm.rank + 1.0), np.zeros(3)
    comm.Allreduce(mine, total, algorithm="native")
    assert (total == comm.size * (comm.size + 1) / 2).all()
    assert comm.last_plan is fast_path.ASKED_FOR
    comm.Barrier()
    assert comm.last_plan is fast_path.LEFT_TO_NATIVE
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
