"""Ordinary arrays that ranks read in one another's processes, and where they cannot."""

import ctypes
import errno
import gc
import logging
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError, Communicator
from collectives.calls import meeting, small
from collectives.execution.transport import attach

pytestmark = pytest.mark.mpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
#: Items of 8 bytes: more than a piece that is read at a time.
MANY = 100_001


@pytest.fixture
def comm(monkeypatch) -> Iterator[Communicator]:
    for module in (meeting, small):
        monkeypatch.setattr(module, "ATTACHED_BYTES", 0)
    with Communicator(MPI.COMM_WORLD, attach=True) as made:
        if SIZE > 1 and made.ranks_per_node == SIZE and not made.attaches:
            pytest.skip("this machine does not let processes read one another's memory")
        yield made


def is_read(comm: Communicator) -> bool:
    """Whether the last call's ranks have read one another's memory."""
    return "read one another's memory" in comm.last_plan.reason


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("count", [1, 100, MANY])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "butterfly", "auto"])
def test_sums_are_those_of_messages(comm, count, algorithm):
    rng = np.random.default_rng(RANK)
    mine = rng.integers(-9, 9, count + RANK).astype(float)[RANK:]  # begins elsewhere on each rank
    kept, total = mine.copy(), np.empty(count)
    wanted = MPI.COMM_WORLD.allreduce(kept)
    plan = comm.Allreduce_init(mine, total, algorithm=algorithm)
    assert SIZE == 1 or is_read(comm) == (algorithm != "auto" or plan.algorithm != "native")
    for turn in range(3):
        mine[:] = kept + turn
        total[:] = -1
        comm.Allreduce(mine, total, algorithm=algorithm)
        np.testing.assert_array_equal(total, wanted + turn * SIZE)
        np.testing.assert_array_equal(mine, kept + turn)
        total[:] = -1
        plan.Start()
        plan.Wait()
        np.testing.assert_array_equal(total, wanted + turn * SIZE)
        total[:] = -1
        request = comm.Iallreduce(mine, total, algorithm=algorithm)
        while not request.Test():
            pass
        np.testing.assert_array_equal(total, wanted + turn * SIZE)
    plan.Free()
    comm.Allreduce(MPI.IN_PLACE, mine, algorithm=algorithm)
    np.testing.assert_array_equal(mine, wanted + 2 * SIZE)


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("count", [0, 1, 5000])
@pytest.mark.parametrize(
    ("name", "algorithm", "sent", "received"),
    [
        ("Allgather", "direct", 1, SIZE),
        ("Alltoall", "pairwise", SIZE, SIZE),
        ("Reduce_scatter_block", "direct", SIZE, 1),
        ("Scan", "recursive_doubling", 1, 1),
        ("Exscan", "recursive_doubling", 1, 1),
        ("Bcast", "binomial_tree", 1, 0),
        ("Bcast", "chain:segments=3", 1, 0),
        ("Reduce", "direct", 1, 1),
        ("Gather", "direct", 1, SIZE),
        ("Scatter", "direct", SIZE, 1),
    ],
)
def test_every_collective(comm, name, algorithm, sent, received, count):
    """Beside mpi4py's own on copies; items before and behind are not touched."""
    arrays = [np.arange(k * count + 2.0) + 1000 * RANK for k in (sent, received)]
    copies = [array.copy() for array in arrays]
    for _ in range(2):
        for (send, recv), where in ((arrays, comm), (copies, MPI.COMM_WORLD)):
            buffers = (send[1:-1],) if name == "Bcast" else (send[1:-1], recv[1:-1])
            how = {"algorithm": algorithm} if where is comm else {}
            getattr(where, name)(*buffers, **how)
        assert is_read(comm) == (SIZE > 1)
        for array, copy in zip(arrays, copies):
            np.testing.assert_array_equal(array, copy)
            array[1:-1] += 1
            copy[1:-1] += 1


def test_memory_of_all_kinds_in_one_call(comm):
    """Some ranks' arrays are shared or adopted, others' ordinary."""
    kinds = [comm.empty(MANY), comm.share(np.zeros(MANY)), np.zeros(MANY)]
    for turn in range(6):
        mine, total = kinds[(RANK + turn) % 3], kinds[(RANK + turn // 2 + 1) % 3]
        if mine is total:
            total = np.zeros(MANY)
        mine[:] = RANK + turn
        comm.Allreduce(mine, total, algorithm="direct")
        assert (total == SIZE * (SIZE - 1) / 2 + SIZE * turn).all()


@pytest.mark.parametrize("name", ["Allgather", "Allreduce", "Alltoall", "Bcast"])
@pytest.mark.parametrize("before", [None, "native", "direct"])
def test_forms_of_buffers_that_differ_in_the_first_call(monkeypatch, name, before):
    """Ranks with plain arrays look first whether they are small, which is collective then."""
    for module in (meeting, small):
        monkeypatch.setattr(module, "ATTACHED_BYTES", 0)
    with Communicator(MPI.COMM_WORLD, attach=True) as comm:
        if before is not None:
            comm.Allreduce(np.ones(MANY), np.empty(MANY), algorithm=before)
        mine = np.full(100 if name == "Allgather" else 100 * SIZE, float(RANK))
        found = mine if name == "Bcast" else np.empty(100 * SIZE)
        given = [found, MPI.DOUBLE] if RANK == LAST else found
        if name == "Bcast":
            comm.Bcast(given)
        else:
            getattr(comm, name)(mine, given)
    wanted = {"Bcast": np.zeros(100 * SIZE), "Allreduce": np.full(100 * SIZE, sum(range(SIZE)))}
    np.testing.assert_array_equal(found, wanted.get(name, np.repeat(np.arange(SIZE), 100)))


def test_arrays_that_are_made_anew_at_the_same_or_another_place(comm):
    live = []
    for turn in range(40):
        array, total = np.full(50_000 + turn, float(RANK)), np.zeros(50_000)
        comm.Allreduce(array[turn:], total, algorithm="direct")
        assert (total == SIZE * (SIZE - 1) / 2).all()
        if (turn + RANK) % 3:
            live.append(array)
        if len(live) > 4:
            live.clear()
            gc.collect()


def test_large_calls_alone_are_read(monkeypatch):
    with Communicator(MPI.COMM_WORLD, attach=True) as comm:
        small, large = np.ones(10), np.ones(1 << 18)
        comm.Allreduce(MPI.IN_PLACE, small, algorithm="ring")
        assert not is_read(comm) and comm._engine.resources.node is None
        comm.Allreduce(MPI.IN_PLACE, large, algorithm="ring")
        if SIZE > 1 and comm.attaches:
            assert is_read(comm)
            comm.Allreduce(MPI.IN_PLACE, large)
            assert comm.last_plan.algorithm.startswith("direct")
        comm.Allreduce(MPI.IN_PLACE, small, algorithm="ring")
        assert (small == SIZE * SIZE).all()


def test_without_the_setting_nothing_is_read(monkeypatch):
    monkeypatch.setattr(meeting, "ATTACHED_BYTES", 0)
    monkeypatch.delenv("COLLECTIVES_ATTACH", raising=False)
    with Communicator(MPI.COMM_WORLD) as comm:
        comm.Allreduce(MPI.IN_PLACE, np.ones(1 << 17), algorithm="direct")
        assert not is_read(comm) and not comm.attaches
    monkeypatch.setenv("COLLECTIVES_ATTACH", "1")
    with Communicator(MPI.COMM_WORLD) as comm:
        assert SIZE == 1 or comm.attaches == (comm.ranks_per_node == SIZE)


def refusing(number: int, rank: int = LAST):
    """The kernel's answer on one rank."""
    real = attach.read

    def read(*given):
        if rank == RANK:
            raise OSError(number, os.strerror(number))
        real(*given)

    return read


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.EPERM, "forbids it|ptrace_scope is"),
        (errno.ESRCH, "containers with process numbers of their own"),
        (errno.ENOSYS, "has no process_vm_readv"),
    ],
)
def test_where_one_rank_may_not_read_all_send_messages(monkeypatch, caplog, number, sentence):
    monkeypatch.setattr(attach, "read", refusing(number))
    caplog.set_level(logging.WARNING, "collectives")
    with Communicator(MPI.COMM_WORLD, attach=True) as comm:
        array = np.full(MANY, float(RANK))
        comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
        assert (array == SIZE * (SIZE - 1) / 2).all()
        assert not comm.attaches and not is_read(comm)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"rank {LAST} cannot read rank 0's" in said
    assert any(words in said for words in sentence.split("|"))


@pytest.mark.mpi(min_size=2)
def test_another_process_of_the_same_number_is_no_peer(monkeypatch):
    """As in containers: what is read there is something else."""
    real = attach.read

    def read(process, source, target, nbytes):
        real(process, source, target, nbytes)
        ctypes.memset(target, 1, 1)

    monkeypatch.setattr(attach, "read", read)
    with Communicator(MPI.COMM_WORLD, attach=True) as comm:
        assert not comm.attaches


@pytest.mark.mpi(min_size=2)
def test_a_buffer_that_the_kernel_does_not_read_goes_as_messages(comm, monkeypatch):
    """A driver's pages, for one; seen before anything is moved."""
    array = np.full(MANY, float(RANK))
    with monkeypatch.context() as patched:
        patched.setattr(attach, "read", refusing(errno.EFAULT))
        comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    assert (array == SIZE * (SIZE - 1) / 2).all() and not is_read(comm)
    other = np.full(MANY, float(RANK))
    comm.Allreduce(MPI.IN_PLACE, other, algorithm="direct")
    assert (other == SIZE * (SIZE - 1) / 2).all() and is_read(comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["blocking", "nonblocking", "persistent"])
def test_a_hole_in_the_root_s_buffer_is_an_error_of_all_ranks(comm, way):
    """Pages in the middle are gone: all ranks raise, none hangs, a new communicator works."""
    pages = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    whole = np.frombuffer(pages, np.uint8)
    if RANK == 0:
        libc = ctypes.CDLL(None)
        middle = ctypes.c_void_p(whole.ctypes.data + 32 * mmap.PAGESIZE)
        assert libc.mprotect(middle, mmap.PAGESIZE, 0) == 0
    named = {"algorithm": "binomial_tree"}
    with pytest.raises(CollectiveError, match=r"could not read all of rank 0's buffer: Bad addr"):
        if way == "blocking":
            comm.Bcast(whole, **named)
        elif way == "nonblocking":
            comm.Ibcast(whole, **named).Wait()
        else:
            plan = comm.Bcast_init(whole, **named)
            plan.Start()
            plan.Wait()
    with pytest.raises(CollectiveError, match="was left in the middle by CollectiveError"):
        comm.Barrier(algorithm="dissemination")
    with Communicator(MPI.COMM_WORLD, attach=True) as other:
        array = np.full(MANY, float(RANK))
        other.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
        assert (array == SIZE * (SIZE - 1) / 2).all()


@pytest.mark.mpi(min_size=2)
def test_a_read_that_ends_short_is_no_result(comm, monkeypatch):
    """On one rank, in the middle of a sum: all raise."""
    array, total = np.full(MANY, float(RANK)), np.zeros(MANY)
    plan = comm.Allreduce_init(array, total, algorithm="direct")
    assert is_read(comm)
    real = attach._kernels_read()
    with monkeypatch.context() as patched:
        if RANK == LAST:
            patched.setattr(attach, "_kernels_read", lambda: lambda *given: real(*given) - 1)
        with pytest.raises(CollectiveError, match=rf"rank {LAST} could not read all of rank \d's"):
            plan()
    with pytest.raises(CollectiveError, match="was left in the middle"):
        plan.Start()


def test_bytes_that_are_read_are_counted(comm):
    traffic = comm.count_traffic()
    comm.Allgather(np.ones(1000), np.empty(1000 * SIZE), algorithm="direct")
    assert traffic.shared == 8000 * (SIZE - 1) and traffic.sent == 0


def test_children_and_what_they_write_are_not_seen(comm):
    array, total = np.full(MANY, float(RANK)), np.zeros(MANY)
    plan = comm.Allreduce_init(array, total, algorithm="direct")
    child = os.fork()
    if child == 0:
        array[:] = -7
        os._exit(0)
    os.waitpid(child, 0)
    plan()
    assert (total == SIZE * (SIZE - 1) / 2).all()
    plan.Free()


def test_a_persistent_plan_keeps_its_arrays(comm):
    plan = comm.Allreduce_init(np.full(MANY, 1.0), total := np.zeros(MANY), algorithm="direct")
    gc.collect()
    others = [np.full(MANY, 5.0) for _ in range(4)]
    plan()
    assert (total == SIZE).all() and len(others) == 4
    plan.Free()
