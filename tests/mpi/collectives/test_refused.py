"""A call that one rank is refused alone, before anything was sent, and makes again."""

import ctypes
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, InvalidBuffer
from collectives.calls.mpi4py_spec import TYPES
from collectives.calls.native import library
from tests.cases import slow_case
from tests.mpi.collectives.forms import FORMS, expect_sum, run, tuned

ITEMS = 50_000


@pytest.fixture
def comm():
    """Its ranks meet before such long calls, as there is memory that they share."""
    made = Communicator(MPI.COMM_WORLD)
    made.empty(1)
    yield made
    made.close()


def not_aligned(items):
    """Long doubles that begin between two addresses where one may."""
    memory = np.zeros(items.nbytes + 1, np.uint8)[1:]
    memory[:] = items.view(np.uint8)
    return memory.view(items.dtype)


def released(items):
    view = memoryview(items.copy())
    view.release()
    return view


#: Buffers that mpi4py refuses; what it takes is refused by no rank.
REFUSED = {
    "a type without sums": lambda items: items.view("V8"),
    "other lengths": lambda items: items[:-1],
    "no such count": lambda items: [items, items.size + 1, MPI.DOUBLE],
    "no type of MPI's": lambda items: [items, "?!"],
    "not contiguous": lambda items: np.repeat(items, 2)[::2],
    "read-only": lambda items: bytes(items),
}


@pytest.mark.parametrize("algorithm", [None, "native", "ring", slow_case("direct")])
@pytest.mark.parametrize("way", FORMS)
@pytest.mark.parametrize("form", REFUSED)
def test_it_can_be_made_again(comm, form, way, algorithm):
    mine, found = np.full(ITEMS, comm.rank + 1.0), np.zeros(ITEMS)
    if comm.rank == comm.size - 1:
        with pytest.raises((ValueError, TypeError, KeyError, BufferError)):
            run(comm, way, "Allreduce", mine, REFUSED[form](found), algorithm=algorithm)
    run(comm, way, "Allreduce", mine, found, algorithm=algorithm)
    np.testing.assert_array_equal(found, comm.size * (comm.size + 1) / 2)


@pytest.mark.parametrize("way", FORMS)
def test_so_can_one_whose_operation_the_type_lacks_or_that_was_freed(comm, way):
    mine, found = np.full(ITEMS, comm.rank + 1.0), np.zeros(ITEMS)
    freed = MPI.Op.Create(lambda left, right, kind: None, commute=True)
    run(comm, way, "Allreduce", mine, found, op=freed, algorithm="ring")
    freed.Free()
    for op in (MPI.LAND, MPI.BXOR, MPI.MINLOC, freed):
        with pytest.raises((InvalidBuffer, MPI.Exception)):
            algorithm = "ring" if op is freed else None
            run(comm, way, "Allreduce", mine, found, op=op, algorithm=algorithm)
    expect_sum(comm, found, form=way)


@pytest.mark.parametrize("make", [np.zeros, slow_case(Communicator.empty)])
@pytest.mark.parametrize("begin", ["Iallreduce", "Allreduce_init"])
def test_two_plans_that_are_under_way_then_are_not_mixed_up(comm, begin, make):
    one, other, *found = (make(comm, 8) if make is not np.zeros else np.zeros(8) for _ in range(4))
    one[:], other[:] = 1.0, 100.0
    call = partial(getattr(comm, begin), algorithm="ring")
    if comm.rank == 0:
        with pytest.raises(InvalidBuffer, match="8 items, but 7 go with"):
            call(one, found[0][:7])
    plans = [call(one, found[0]), call(other, found[1])]
    for plan in plans if begin == "Allreduce_init" else ():
        plan.Start()
    for plan in plans:
        plan.Wait()
    assert (found[0] == comm.size).all() and (found[1] == 100.0 * comm.size).all()


@pytest.mark.parametrize("way", FORMS[:2])
def test_a_watchdog_counts_it_once(way):
    with Communicator(MPI.COMM_WORLD, timeout=60) as comm:
        if comm.rank == 0:
            with pytest.raises(InvalidBuffer):
                run(comm, way, "Allreduce", np.ones(8), np.zeros(7), algorithm="ring")
        expect_sum(comm, np.zeros(8), "ring", form=way)
        assert len({*MPI.COMM_WORLD.allgather(comm._engine.watchdog.calls.made)}) == 1


@pytest.mark.parametrize("way", FORMS)
@pytest.mark.parametrize("fault", ["share", "no way to reduce", "no exact sums"])
def test_so_is_what_a_reproducible_sum_cannot_be(way, fault):
    with Communicator(MPI.COMM_WORLD, reproducible=True) as comm:
        comm.empty(1)
        mine, found = np.full(ITEMS, comm.rank + 1.0), np.zeros(ITEMS)
        refused = {
            "share": (found[:-1], found[1:]),
            "no way to reduce": (mine, found, MPI.Op.Create(lambda a, b, kind: None)),
            "no exact sums": (mine.astype("g"), found.astype("g")),
        }
        if comm.rank == 0:
            with pytest.raises(ValueError, match=fault):
                run(comm, way, "Allreduce", *refused[fault])
        expect_sum(comm, found, form=way)


def test_buffers_that_share_memory_where_auto_takes_ours_are_refused_or_copied(tmp_path):
    """MPI forbids them, and Open MPI takes them; here rank 0 alone has some."""
    table = tuned(tmp_path, ("numpy", "ring", 0), ("shared", "ring", 0))
    with Communicator(MPI.COMM_WORLD, tuning=table) as comm:
        memory = comm.empty(ITEMS + 1)
        send, recv = np.full(ITEMS, comm.rank + 1.0), np.zeros(ITEMS)
        if comm.rank == 0:
            memory[:] = 1.0
            try:
                comm.Allreduce(memory[:-1], memory[1:])
                recv = memory[1:]
            except ValueError:
                assert not library().startswith("Open MPI")
                comm.Allreduce(send, recv)
        else:
            comm.Allreduce(send, recv)
        np.testing.assert_array_equal(recv, comm.size * (comm.size + 1) / 2)


@pytest.mark.parametrize("items", [3, ITEMS])
@pytest.mark.parametrize("form", [lambda a: [a, MPI.INT64_T], lambda a: [a], lambda a: (a,)])
@pytest.mark.parametrize("way", FORMS)
def test_what_is_read_in_more_forms_than_mpi4py_reads(comm, way, form, items):
    """``MPI.LONG`` with ``MPI.INT64_T``, and an array alone in a list: here on one rank."""
    mine, found = np.full(items, comm.rank + 1), np.zeros(items, int)
    if items == 3 and way == "blocking" and len(form(found)) == 2:
        pytest.skip("left to mpi4py unread, and refused before anything is sent")
    run(comm, way, "Allreduce", mine, form(found) if comm.rank == 0 else found)
    np.testing.assert_array_equal(found, comm.size * (comm.size + 1) // 2)


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_longdouble) == 8, reason="long doubles are doubles")
@pytest.mark.parametrize("way", FORMS)
def test_long_doubles_that_are_not_aligned(comm, way):
    mine, found = np.full(ITEMS, comm.rank + 1, "g"), np.zeros(ITEMS, "g")
    if comm.rank == 0:
        mine, found = not_aligned(mine), not_aligned(found)
    run(comm, way, "Allreduce", mine, found)
    np.testing.assert_array_equal(found, comm.size * (comm.size + 1) // 2)


@pytest.mark.parametrize("items", [1, ITEMS])
@pytest.mark.parametrize("form", [released, lambda items: [released(items), MPI.BYTE]])
def test_a_buffer_that_no_rank_looks_at_may_be_anything(comm, items, form):
    mine, whole = np.full(items, comm.rank + 1.0), np.zeros(items * comm.size)
    at_root = comm.rank == 0
    comm.Gather(mine, whole if at_root else form(whole))
    comm.Reduce(mine, total := np.zeros(items) if at_root else form(mine))
    back = np.zeros(items)
    comm.Scatter(whole if at_root else form(whole), back)
    np.testing.assert_array_equal(back, mine)
    if at_root:
        np.testing.assert_array_equal(total, comm.size * (comm.size + 1) / 2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("algorithm", ["chain", "recursive_doubling", "native"])
@pytest.mark.parametrize("way", FORMS)
def test_an_exclusive_scan_leaves_rank_0_its_buffer(comm, way, algorithm, dtype):
    if algorithm == "native" and np.dtype(dtype).char not in TYPES:
        pytest.skip(f"this MPI has no {dtype}")
    mine, found = np.full(6, 2, dtype), np.full(6, 42, dtype)
    run(comm, way, "Exscan", mine, found, algorithm=algorithm)
    np.testing.assert_array_equal(found, 2 * comm.rank if comm.rank else 42)
