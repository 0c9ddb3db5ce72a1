"""Whatever mpi4py takes as a buffer, in every form, and different ones on different ranks."""

import array
import ctypes
import mmap
from operator import itemgetter

import numpy as np
import pytest
from mpi4py import MPI

from collectives import InvalidBuffer
from collectives.calls import mpi4py_spec
from tests.mpi.collectives.forms import Exported, Interface, total

two_or_more = pytest.mark.mpi(min_size=2)
few_enough = pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="shown on up to 4 ranks")
WAYS = ["ring", "butterfly", "auto", "native"]


def anonymous(items):
    made = np.frombuffer(mmap.mmap(-1, items.nbytes), items.dtype)
    made[...] = items
    return made


FIRST = itemgetter(0)
#: Makers of a buffer from an array of doubles, and how to see what is in it then.
KINDS = {
    "array": (lambda items: items, np.asarray),
    "memoryview": (memoryview, np.asarray),
    "array.array": (lambda items: array.array("d", items), np.asarray),
    "bytearray": (lambda a: [bytearray(a), MPI.DOUBLE], lambda spec: np.frombuffer(spec[0])),
    "ctypes": (lambda items: (ctypes.c_double * items.size).from_buffer(items), np.asarray),
    "subclass": (lambda items: items.view(np.matrix), lambda made: np.asarray(made).ravel()),
    "masked": (lambda a: np.ma.MaskedArray(a, mask=[True] * a.size), lambda made: made.data),
    "mapped": (anonymous, np.asarray),
    "DLPack": (Exported, lambda made: made.items),
    "interface": (Interface, lambda made: made.items),
    "typed": (lambda items: [items, MPI.DOUBLE], FIRST),
    "named": (lambda items: [items, "d"], FIRST),
    "counted": (lambda items: [items, items.size, MPI.DOUBLE], FIRST),
    "counted alone": (lambda items: [items, items.size], FIRST),
    "in four parts": (lambda items: [items, items.size, 0, MPI.DOUBLE], FIRST),
    "by columns": (lambda items: np.asfortranarray(items.reshape(2, -1)), np.asarray),
    "torch": (lambda items: pytest.importorskip("torch").from_numpy(items), np.asarray),
    "displaced": (lambda items: (items, (np.int64(items.size), 0), "d"), FIRST),
}


@few_enough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", WAYS)
def test_buffers_made_anew_for_each_call(comm, kind, algorithm):
    """CPython gives the id and the memory of what is dropped to what comes next."""
    made, seen = KINDS[kind]
    for turn in range(6):
        send, recv = made(np.full(600, turn + comm.rank, float)), made(np.zeros(600))
        comm.Allreduce(send, recv, algorithm=algorithm)
        assert (seen(recv) == turn * comm.size + total(comm)).all()
        both = made(np.full(600, turn + comm.rank, float))
        comm.Iallreduce(MPI.IN_PLACE, both, algorithm=algorithm).Wait()
        assert (seen(both) == turn * comm.size + total(comm)).all()


TYPES = {
    "every other": (lambda: MPI.DOUBLE.Create_vector(6, 1, 2), slice(0, 12, 2)),
    "longer than it is": (lambda: MPI.DOUBLE.Create_resized(0, 24), slice(0, 18, 3)),
    "further on": (lambda: MPI.DOUBLE.Create_hindexed([3, 3], [16, 72]), [2, 3, 4, 9, 10, 11]),
    "in pairs": (lambda: MPI.DOUBLE.Create_contiguous(2), slice(0, 6)),
    "backwards": (lambda: MPI.DOUBLE.Create_indexed([1] * 6, range(5, -1, -1)), slice(5, None, -1)),
    "a vector without gaps": (lambda: MPI.DOUBLE.Create_vector(3, 2, 2), slice(0, 6)),
    "a struct in order": (
        lambda: MPI.Datatype.Create_struct([2, 4], [0, 16], [MPI.DOUBLE] * 2),
        slice(0, 6),
    ),
    "a struct out of order": (
        lambda: MPI.Datatype.Create_struct([2, 4], [32, 0], [MPI.DOUBLE] * 2),
        [4, 5, 0, 1, 2, 3],
    ),
    "transposed": (
        lambda: MPI.DOUBLE.Create_vector(2, 1, 3).Create_hvector(3, 1, 8),
        [0, 3, 1, 4, 2, 5],
    ),
}


@two_or_more
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("algorithm", ["binomial_tree", "native", "auto"])
def test_types_that_differ_between_ranks(comm, name, algorithm):
    """Six numbers lie in a type with gaps on rank 0, one behind the other on the others."""
    make, where = TYPES[name]
    kind = make()  # ours need no Commit
    if algorithm in ("auto", "native"):
        kind.Commit()
    count = {"longer than it is": 6, "in pairs": 3}.get(name, 1)
    for root in range(comm.size):
        for _ in range(3):
            spread, packed = np.arange(40.0) + 100 * comm.rank, np.arange(6.0) + 100 * comm.rank
            expected = np.arange(40.0)[where] if root == 0 else np.arange(6.0) + 100 * root
            if comm.rank == 0:
                before = spread.copy()
                comm.Bcast([spread, count, kind], root, algorithm=algorithm)
                before[where] = expected
                assert np.array_equal(spread, before), "and what lies in the gaps stays"
            else:
                comm.Bcast(packed, root, algorithm=algorithm)
                assert np.array_equal(packed, expected)
    spread[...], packed[...] = np.arange(40.0), np.zeros(6)
    kind.Commit()
    plan = comm.Bcast_init([spread, count, kind] if comm.rank == 0 else packed, 0)
    kind.Free()  # as MPI allows
    plan()
    assert np.array_equal(spread[where] if comm.rank == 0 else packed, np.arange(40.0)[where])
    plan.Free()


@pytest.mark.parametrize("algorithm", ["pairwise", "native", "auto"])
@pytest.mark.parametrize("gapped", [False, True])
def test_blocks_with_gaps_of_a_derived_type(comm, algorithm, gapped):
    vector = MPI.INT.Create_vector(2, 1, 2).Create_resized(0, 16)
    kind = (vector if gapped else MPI.INT.Create_contiguous(4)).Commit()
    counts, places = [1 + j % 2 for j in range(comm.size)], [3 * j for j in range(comm.size)]
    send, results = np.arange(12 * comm.size, dtype="i4") + 1000 * comm.rank, []
    sent = [send, ([counts[comm.rank]] * comm.size, places), kind]
    for name in (algorithm, "native"):
        recv = np.full(12 * comm.size, -1, "i4")
        comm.Alltoallv(sent, [recv, (counts, places), kind], algorithm=name)
        results.append(recv)
    assert np.array_equal(*results)
    kind.Free()


def test_a_type_with_gaps_is_packed_in_parts_that_31_bits_count(comm, monkeypatch):
    monkeypatch.setattr(mpi4py_spec, "COUNTABLE", 50)  # of 48 bytes each
    kind = MPI.DOUBLE.Create_vector(6, 1, 2).Commit()
    items = np.arange(60.0) * (comm.rank == 0)
    comm.Bcast([items, 5, kind], algorithm="chain")
    assert np.count_nonzero(items) == (59 if comm.rank == 0 else 29)
    kind.Free()


@pytest.mark.parametrize("form", ["Allreduce", "Iallreduce", "Allreduce_init"])
@pytest.mark.parametrize("how", [{}, {"algorithm": "native"}])
@pytest.mark.parametrize("step", [1, 2])
def test_the_library_reduces_items_of_derived_types(comm, form, how, step):
    def add(left, right, _):
        np.frombuffer(right)[::step] += np.frombuffer(left)[::step]

    op, kind = MPI.Op.Create(add, commute=True), MPI.DOUBLE.Create_vector(4 // step, 1, step)
    kind = kind.Create_resized(0, 32).Commit()
    items = np.arange(12.0) + comm.rank
    begun = getattr(comm, form)(MPI.IN_PLACE, [items, 3, kind], op, **how)
    if form.endswith("init"):
        kind.Free()  # as MPI allows
        begun.Start()
    if begun is not None:
        begun.Wait()
    expected = np.arange(12.0) + comm.rank
    expected[::step] = np.arange(12.0)[::step] * comm.size + total(comm)
    assert np.array_equal(items, expected)


def test_a_root_may_send_what_it_may_not_write(comm):
    for algorithm in ("binomial_tree", "chain", "native", "auto"):
        for items in (10, 30_000):
            values = np.arange(items) * (comm.rank == 0)
            values.flags.writeable = comm.rank != 0
            comm.Bcast(values, algorithm=algorithm)
            assert np.array_equal(values, np.arange(items))


@two_or_more
@pytest.mark.parametrize("shared", [False, True])
def test_buffers_that_share_memory_are_refused(comm, shared):
    items = comm.empty(100) if shared else np.zeros(100)
    for send, recv in ((items, items), (items[:60], items[40:])):
        with pytest.raises(InvalidBuffer, match=r"share \d+ bytes; pass MPI.IN_PLACE"):
            comm.Allreduce(send, recv, algorithm="butterfly")


@pytest.mark.parametrize("algorithm", ["binomial_tree", "native", "auto"])
def test_addresses_in_a_type_from_the_bottom_of_memory(comm, algorithm):
    """Two arrays and a part of a third in one broadcast, as C programs send structures."""
    arrays = [np.full(n, 10.0 * comm.rank + n) for n in (3, 5, 4)]
    parts = [arrays[0], arrays[1], arrays[2][1:3]]
    kind = MPI.DOUBLE.Create_hindexed([part.size for part in parts], [*map(MPI.Get_address, parts)])
    kind.Commit()
    for root in range(comm.size):
        for n, each in zip((3, 5, 4), arrays):
            each[:] = 10 * comm.rank + n
        comm.Bcast([MPI.BOTTOM, 1, kind], root, algorithm=algorithm)
        assert [part.tolist() for part in parts] == [
            [10.0 * root + n] * part.size for n, part in zip((3, 5, 4), parts)
        ]
        assert arrays[2][[0, 3]].tolist() == [10 * comm.rank + 4] * 2
    received = np.zeros(10 * comm.size)
    named = {} if algorithm == "binomial_tree" else {"algorithm": algorithm}
    comm.Allgather([MPI.BOTTOM, 1, kind], received, **named)
    assert (received.reshape(comm.size, 10) == np.concatenate(parts)).all()
    kind.Free()


@two_or_more
def test_types_with_gaps_keep_no_memory(comm):
    """One rank's memory; its root's type has no gaps."""
    kind = MPI.DOUBLE.Create_resized(0, 16).Commit()
    mine, everybody = bytearray(160), np.zeros(10 * comm.size)
    root = {"algorithm": "direct"}
    comm.Gather([mine, kind], everybody if comm.rank == 0 else None, 0, **root)
    mine.extend(b"it lets itself be resized")
    kind.Free()
