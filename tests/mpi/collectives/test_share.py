"""Ordinary arrays in shared memory where they lie: what is computed, and who has the pages."""

import ctypes
import gc
import mmap
import os
import random
import resource
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError, Communicator, InvalidBuffer, MismatchError
from collectives.execution.transport import remapped
from collectives.execution.transport.pages import regions
from tests.mpi.collectives.forms import fresh

pytestmark = pytest.mark.mpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
PAGE = mmap.PAGESIZE
TRANSPORT = "execution.transport.remapped"
#: Bytes: nothing, no whole page, one or two of them, many.
BYTES = (0, 8, 4000, 12_000, 100_000, 3 << 20)


comm = pytest.fixture(fresh)


@pytest.fixture(autouse=True)
def reclaimed() -> Iterator[None]:
    """Later tests find no pages of windows that have ended."""
    yield
    for _ in remapped.restore(remapped._KEPT):
        pass
    remapped._KEPT.clear()


def is_adopted(array: np.ndarray) -> bool:
    """Whether its whole pages are shared."""
    first = -(-array.ctypes.data // PAGE) * PAGE
    last = (array.ctypes.data + array.nbytes) // PAGE * PAGE
    return first < last and all(
        "memfd:collectives" in region.name for region in regions(first, last)
    )


def at(nbytes: int, margin: int) -> np.ndarray:
    """A new array that begins so many bytes after the start of a page."""
    whole = np.zeros(nbytes + 2 * PAGE, np.uint8)
    start = -whole.ctypes.data % PAGE + margin
    return whole[start : start + nbytes]


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("nbytes", BYTES)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "auto"])
def test_sums_are_those_of_ordinary_memory(comm, nbytes, algorithm):
    """Each rank's array begins elsewhere on its page; what lies around it stays as it is."""
    items = [at(nbytes, 8 * (1 + 3 * RANK + k)).view(float) for k in range(2)]
    around = [array.base for array in items]
    rng = np.random.default_rng(RANK)
    mine, total = items
    for array in around:
        array[:] = 7
    mine[:] = rng.integers(-9, 9, mine.size)
    kept = mine.copy()
    total[:] = 0
    wanted = MPI.COMM_WORLD.allreduce(kept)
    assert comm.share(mine) is mine
    assert comm.share(total) is total
    np.testing.assert_array_equal(mine, kept)
    assert is_adopted(mine) == (nbytes > 2 * PAGE)
    plan = comm.Allreduce_init(mine, total, algorithm=algorithm)
    for turn in range(3):
        mine[:] = kept + turn
        comm.Allreduce(mine, total, algorithm=algorithm)
        np.testing.assert_array_equal(total, wanted + turn * SIZE)
        np.testing.assert_array_equal(mine, kept + turn)
        total[:] = -1
        plan.Start()
        plan.Wait()
        np.testing.assert_array_equal(total, wanted + turn * SIZE)
        total[:] = -1
        comm.Iallreduce(mine, total, algorithm=algorithm).Wait()
        np.testing.assert_array_equal(total, wanted + turn * SIZE)
    plan.Free()
    comm.Allreduce(MPI.IN_PLACE, mine, algorithm=algorithm)
    np.testing.assert_array_equal(mine, wanted + 2 * SIZE)
    for whole, part in zip(around, items):
        start = part.ctypes.data - whole.ctypes.data
        assert (whole[:start] == 7).all()
        assert (whole[start + nbytes :] == 7).all()


def test_loads_and_stores_are_used(comm):
    a, b = (comm.share(np.ones(SIZE << 17)) for _ in range(2))
    comm.Allreduce(a, b, algorithm="direct")
    if SIZE > 1 and comm.ranks_per_node == SIZE:
        assert is_adopted(a)
        assert "segments" in comm.last_plan.algorithm  # of a cache's size: in shared memory alone


def test_views_and_plans_of_before_stay_right(comm):
    array = np.arange(100_000.0) + RANK
    part, total = array[1000:90_000], np.empty(89_000)
    plan = comm.Allreduce_init(part, total, algorithm="ring")
    comm.Allreduce(part, total)
    wanted = SIZE * np.arange(1000.0, 90_000) + SIZE * (SIZE - 1) / 2
    np.testing.assert_array_equal(total, wanted)
    comm.share(array)
    comm.share(total)
    for turn in range(2):
        part[:] = np.arange(1000.0, 90_000) + RANK + turn
        total[:] = -1
        comm.Allreduce(part, total)
        np.testing.assert_array_equal(total, wanted + turn * SIZE)
        total[:] = -1
        plan.Start()
        plan.Wait()
        np.testing.assert_array_equal(total, wanted + turn * SIZE)
    assert array[0] == RANK
    plan.Free()


@pytest.mark.quick_on(2)
def test_arrays_die_in_any_order_and_their_addresses_come_again(comm):
    """What lies where a shared array was is ordinary memory; all have the right sums."""
    rng, live = random.Random(RANK), []
    for turn in range(60):
        array = np.full(rng.choice((2000, 20_000, 300_000)), float(turn))
        count = 2000
        if turn % 3:
            comm.share(array)
        total = np.empty(count)
        comm.Allreduce(array[:count], total, algorithm="direct")
        assert (total == turn * SIZE).all()
        assert (array == turn).all()
        live.append(array)
        if len(live) > 3:
            del live[rng.randrange(len(live))]
        del array
        if turn % 10 == 0:
            gc.collect()
    assert all((array == array[0]).all() for array in live)


def test_an_array_that_is_shared_cannot_be_resized(comm):
    array, other = np.arange(10_000.0), np.arange(10_000.0)
    comm.share(array)
    comm.share(np.frombuffer(memoryview(other)))
    for one in (array, other):
        with pytest.raises(ValueError, match="cannot resize"):
            one.resize(20_000, refcheck=False)
        assert (one == np.arange(10_000.0)).all()


@pytest.mark.mpi(min_size=2)
def test_a_bytearray_that_is_shared_cannot_be_resized(comm):
    """NumPy's array on it does not hold it where it is."""
    base = bytearray(400_000)
    array = comm.share(np.ndarray(50_000, buffer=base))
    if comm.ranks_per_node == SIZE:
        with pytest.raises(BufferError):
            base.extend(b"abc")
    del array
    base.extend(b"abc")


def test_memory_that_an_array_has_left_is_no_window(comm):
    """``__setstate__`` gives an array other memory behind everybody's back."""
    array = comm.share(np.full(50_000, RANK + 1.0))
    array.__setstate__((1, (50_000,), np.dtype(float), False, np.full(50_000, 2.0).tobytes()))
    others = [np.full(50_000, RANK + 3.0) for _ in range(8)]
    for one in (array, *others):
        first, total = one[0], np.empty(50_000)
        comm.Allreduce(one, total, algorithm="direct")
        assert (total == MPI.COMM_WORLD.allreduce(first)).all()
    del array, one
    gc.collect()
    assert all((one == RANK + 3).all() for one in others)


def pages_at_the_end(monkeypatch) -> list[bool]:
    """For each shared array that ends from now on, whether its pages are there still."""
    found, give_back = [], remapped.Adopted.give_back

    def look(window):
        files = [region.file for region in regions(window.first, window.last)]
        found.append(files == [window.file])
        give_back(window)

    monkeypatch.setattr(remapped.Adopted, "give_back", look)
    return found


@pytest.mark.quick_on(2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "made",
    [np.zeros, lambda n: np.zeros((2, n // 2)).T[:], lambda n: np.frombuffer(bytearray(8 * n))],
)
def test_the_pages_come_back_before_the_memory_is_freed(comm, monkeypatch, made):
    """Afterwards another thread may have it.  Memory of so many bytes is unmapped when freed."""
    found = pages_at_the_end(monkeypatch)
    array = made(5 << 20)
    for _ in range(2):
        comm.share(array)
        comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    with Communicator(MPI.COMM_WORLD) as other:
        comm.close()
        other.share(array)
        del array
        gc.collect()
    assert found == [True] * 2 * (comm.ranks_per_node == SIZE)


def test_closing_gives_the_pages_back():
    comm = Communicator(MPI.COMM_WORLD)
    array, view = np.arange(50_000.0) + RANK, None
    view = array[1:]
    comm.share(array)
    assert is_adopted(array) == (comm.ranks_per_node == SIZE)
    comm.close()
    assert not is_adopted(array)
    np.testing.assert_array_equal(array, np.arange(50_000.0) + RANK)
    view[:] = 3
    assert array[1] == 3
    comm.share(array)  # the communicator stays of use
    comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    assert (view == 3 * SIZE).all()
    comm.close()


def test_the_pages_come_back_where_there_is_no_room_for_a_second_array():
    comm = Communicator(MPI.COMM_WORLD)
    array = comm.share(np.arange(16 << 17) + RANK)
    with open("/proc/self/statm", encoding="ascii") as sizes:
        there = int(sizes.read().split()[0]) * PAGE
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (there + array.nbytes // 2, hard))
    try:
        comm.close()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert not is_adopted(array)
    np.testing.assert_array_equal(array, np.arange(array.size) + RANK)


def test_another_communicator_meets_ordinary_memory(comm):
    array = comm.share(np.full(50_000, RANK + 1.0))
    total = np.empty(50_000)
    with Communicator(MPI.COMM_WORLD) as other:
        other.Allreduce(array, total, algorithm="direct")
        assert (total == SIZE * (SIZE + 1) / 2).all()
        if is_adopted(array):
            with pytest.raises(InvalidBuffer, match=r"rank 0: the array lies on pages of /memfd"):
                other.share(array)
        small = np.full(10, RANK + 1.0)  # on no page of its own: each has a copy
        other.share(comm.share(small))
        for one in (comm, other, comm):
            one.Allreduce(small, total[:10], algorithm="direct")
            assert (total[:10] == SIZE * (SIZE + 1) / 2).all()
    comm.Allreduce(array, total, algorithm="direct")
    assert (total == SIZE * (SIZE + 1) / 2).all()


def test_sharing_twice_changes_nothing(comm):
    array = np.arange(50_000.0)
    comm.share(array)
    comm.share(array)
    comm.share(array[100:])
    comm.share(comm.empty(1000))
    comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    np.testing.assert_array_equal(array, SIZE * np.arange(50_000.0))


@pytest.mark.mpi(min_size=2)
def test_arrays_that_are_shared_on_some_ranks_are_refused_on_all(comm):
    comm.share(first := np.arange(50_000.0))
    second = np.arange(50_000.0)
    with pytest.raises(InvalidBuffer, match="partly shared already"):
        comm.share(first if RANK == 0 else second)
    assert not is_adopted(second)
    comm.Allreduce(MPI.IN_PLACE, second, algorithm="direct")
    np.testing.assert_array_equal(second, SIZE * np.arange(50_000.0))


def test_ranks_share_arrays_of_other_sizes_and_types(comm):
    array = np.full(30_000 * RANK, RANK, [np.int32, np.float64][RANK % 2])
    comm.share(array)
    assert (array == RANK).all()
    total = np.empty(SIZE)
    comm.Allgather(np.array([array.sum()], float), total)
    assert (total == [30_000 * rank * rank for rank in range(SIZE)]).all()


def not_to_be_shared(tmp_path) -> dict[str, tuple[object, str]]:
    (tmp_path / f"{RANK}").write_bytes(bytes(100_000))
    return {
        "list": ([1, 2], "a list is no NumPy array"),
        "objects": (np.array([None]), "Python objects"),
        "strided": (np.zeros((300, 300))[:, ::2], "not contiguous"),
        "ctypes": (np.ctypeslib.as_array((ctypes.c_double * 20_000)()), "belongs to a"),
        "memmap": (np.memmap(tmp_path / f"{RANK}", np.uint8, "r+"), "belongs to a mmap"),
    }


@pytest.mark.parametrize("kind", ["list", "objects", "strided", "ctypes", "memmap"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_cannot_be_shared_is_refused_on_all_ranks(comm, tmp_path, kind, everywhere):
    wrong, sentence = not_to_be_shared(tmp_path)[kind]
    fine = np.arange(50_000.0)
    last = SIZE - 1
    named = range(SIZE) if everywhere else [last]
    with pytest.raises(InvalidBuffer, match=rf"Communicator.share: rank {named[0]}: .*{sentence}"):
        comm.share(wrong if RANK in named else fine)
    assert not is_adopted(fine)
    comm.share(fine)
    comm.Allreduce(MPI.IN_PLACE, fine, algorithm="direct")
    np.testing.assert_array_equal(fine, SIZE * np.arange(50_000.0))


def test_a_copy_that_numpy_writes_back_is_refused(comm):
    """Its base is the array that it is of, which lives on when the copy is freed."""
    given = np.zeros(50_000), [], [["readwrite", "updateifcopy"]], [np.dtype(np.float32)]
    copies = np.nditer(*given, casting="unsafe")
    with copies, pytest.raises(InvalidBuffer, match="belongs to a ndarray"):
        comm.share(copies.operands[0])


@pytest.mark.parametrize("made", [bytearray, lambda n: memoryview(bytearray(n)), bytes])
def test_memory_that_python_has_allocated(comm, made):
    base = made(400_000)
    array = np.frombuffer(base, float)
    comm.share(array)
    assert is_adopted(array) == (comm.ranks_per_node == SIZE)
    if array.flags.writeable:
        array[:] = RANK
        comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    kept = array.copy()
    del array
    np.testing.assert_array_equal(np.frombuffer(base, float), kept)
    if not isinstance(base, memoryview | bytes):
        base.extend(b"abc")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, OSError])
@pytest.mark.parametrize("where", ["extent", "Adopted.adopt"])
def test_any_error_of_one_rank_is_one_of_all(comm, monkeypatch, kind, where):
    def fail(*_):
        raise kind("of a strange tensor")

    array = np.arange(50_000.0)
    if RANK == SIZE - 1:
        where = "calls.resources.extent" if where == "extent" else f"{TRANSPORT}.{where}"
        monkeypatch.setattr(f"collectives.{where}", fail)
    if "extent" in where:
        with pytest.raises(InvalidBuffer, match=rf"rank {SIZE - 1}: {kind.__name__}: of a strange"):
            comm.share(array)
    else:
        comm.share(array)  # a warning in the log
    assert not is_adopted(array)
    monkeypatch.undo()
    comm.share(array)
    comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    np.testing.assert_array_equal(array, SIZE * np.arange(50_000.0))


@pytest.mark.parametrize("ends", ["close", "revoke"])
def test_a_plan_ends_with_the_communicator(monkeypatch, ends):
    comm = Communicator(MPI.COMM_WORLD)
    array = comm.share(np.ones(20_000))
    was_adopted = is_adopted(array)
    plan = comm.Allreduce_init(MPI.IN_PLACE, array, algorithm="direct")
    plan.Start()
    plan.Wait()
    if ends == "revoke":
        # Without the duplicate: not all MPIs can revoke it.
        monkeypatch.setattr(comm._engine.resources, "_transport", None)
        comm._engine.revoke()
    else:
        comm.close()
    assert (array == SIZE).all()
    if was_adopted:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="was freed; make another one"):
                plan.Start()
    assert (array == SIZE).all()


@pytest.mark.mpi(min_size=2)
def test_checking_finds_ranks_that_share_nothing():
    with Communicator(MPI.COMM_WORLD, check=True) as comm:
        array = np.ones(10_000)
        for method in (comm.share, lambda _: comm.empty(10)):
            with pytest.raises(MismatchError, match=r"share|empty"):
                method(array) if RANK == 0 else comm.Allreduce(MPI.IN_PLACE, array)
        comm.share(array)
        comm.Allreduce(MPI.IN_PLACE, array)
        assert (array == SIZE).all()


@pytest.mark.parametrize("method", ["share", "empty"])
def test_an_exception_in_the_middle_is_remembered(monkeypatch, method):
    """Of a signal's handler, for one."""
    comm = Communicator(MPI.COMM_WORLD)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(comm._engine.resources, method, interrupted)
    given = np.ones(10_000) if method == "share" else 10
    with pytest.raises(KeyboardInterrupt):
        getattr(comm, method)(given)
    monkeypatch.undo()
    with pytest.raises(CollectiveError, match=rf"{method} was left in the middle by Keyboard"):
        getattr(comm, method)(given)


def test_a_page_that_cannot_be_put_there_leaves_all_as_it_was(comm, monkeypatch):
    if RANK == SIZE - 1:

        def refuse(*_):
            raise OSError(12, "no more mappings")

        monkeypatch.setattr("collectives.execution.transport.remapped.put", refuse)
    array = np.arange(50_000.0)
    comm.share(array)  # a warning in the log
    assert not is_adopted(array)
    comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    np.testing.assert_array_equal(array, SIZE * np.arange(50_000.0))


def test_a_child_has_its_own_array_as_it_was(comm):
    """And whatever parent and child write, the other does not see."""
    array = comm.share(np.arange(100_000.0) + RANK)
    kept = array.copy()
    to_child, from_child = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(to_child[0], 1)  # the parent has written by now
        same = bool((array == kept).all()) and not is_adopted(array)
        array[:] = -2
        os.write(from_child[1], b"1" if same else b"0")
        os._exit(0)
    array[:] = -1
    os.write(to_child[1], b".")
    answer = os.read(from_child[0], 1)
    os.waitpid(child, 0)
    for end in (*to_child, *from_child):
        os.close(end)
    assert answer == b"1"
    assert (array == -1).all()
    array[:] = 1
    comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    assert (array == SIZE).all()


def test_forks_where_descriptors_run_out(comm):
    """The child has its own array, or is not; the parent's descriptors stay open."""
    array = comm.share(np.full(100_000, float(RANK)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in (0, 1, 2, 3):
        opened = {int(name) for name in os.listdir("/proc/self/fd")}
        most = max(opened) + 1 + spare
        held = [os.dup(0) for number in range(max(opened)) if number not in opened]
        before = {int(name) for name in os.listdir("/proc/self/fd")}
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            child = os.fork()
            if child == 0:
                array[:] = -7
                os._exit(0)
            os.waitpid(child, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (array == RANK).all()
        after = {int(name) for name in os.listdir("/proc/self/fd")}
        assert {n for n in before if n <= max(opened)} <= after | {max(before)}
        for number in held:
            os.close(number)


def test_a_signals_handler_may_fork_in_the_hook_of_another_fork(comm):
    """Each waits for its own child, and closes its own descriptors."""
    array = comm.share(np.full(100_000, float(RANK)))
    before = sorted(os.listdir("/proc/self/fd"))
    remapped._before_fork()
    remapped._before_fork()
    assert len(remapped._FORKS.pipes) == 2
    for pipe in remapped._FORKS.pipes:
        if pipe is not None:
            os.write(pipe[1], b".")  # as a child does that is ready
    for _ in range(2):
        remapped._in_parent()
    assert remapped._FORKS.pipes == []
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert (array == RANK).all()


def adopt_often(comm: Communicator, times: int) -> tuple[int, int]:
    """How many maps and descriptors there are more than after the first turns."""

    def used() -> tuple[int, int]:
        with open("/proc/self/maps") as lines:
            return len(lines.readlines()), len(os.listdir("/proc/self/fd"))

    rng = random.Random(RANK)
    live: list[np.ndarray] = []
    before = (0, 0)
    for turn in range(times):
        live.append(comm.share(np.full(rng.choice((100, 2000, 20_000, 200_000)), float(turn))))
        if len(live) > 5:
            gone = live.pop(rng.randrange(6))
            assert (gone == gone[0]).all()
            del gone
        if turn == times // 4:
            before = used()
    after = used()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.quick_on(2)
def test_adoptions_leave_nothing_behind(comm):
    maps, descriptors = adopt_often(comm, 100)
    assert maps < 40
    assert descriptors == 0


@pytest.mark.slow
def test_ten_thousand_adoptions_leave_nothing_behind(comm):
    """By all ranks together."""
    maps, descriptors = adopt_often(comm, 10_000 // SIZE)
    assert maps < 100
    assert descriptors == 0


def test_auto_leaves_short_arrays_with_edges_to_native(comm):
    """To copy the bytes on the first and the last page takes longer than a message."""
    for nbytes, algorithm in ((64 << 10, "native"), (1 << 20, "direct")):
        array = comm.share(np.full(nbytes // 4, comm.rank, np.float32))
        comm.Allreduce(MPI.IN_PLACE, array)
        assert (array == sum(range(comm.size))).all()
        if comm.size > 1:
            assert comm.last_plan.algorithm.startswith(algorithm)
