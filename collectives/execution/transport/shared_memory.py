"""Memory of one node that all its ranks can address, and flags in it to synchronise by.

Flags are counters, each written by one rank and polled by the others.  Plain loads and stores do,
because x86-64 keeps stores in order; on another machine they would need fences that Python lacks.
"""

import ctypes
import mmap
import os
import platform
import weakref
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.errors import InvalidBuffer
from collectives.execution.lanes import Lanes
from collectives.execution.memory import HOST, DeviceMemory, Items, Memory
from collectives.execution.plan import Action
from collectives.execution.transport import Bytes, cuda_ipc

_LINE = 8  # a cache line in 8-byte words: two ranks never write to the same one
#: Plans in flight at a time that can be told apart.
SLOTS = 512
#: The slot of :meth:`NodeMemory.meet`, and how many 8-byte words each rank can bring to it.
MEETING = 0
#: The slot of blocking calls, which follow one another; those of other plans come after it.
BLOCKING = 1
WORDS = 4
#: Polls before a rank with a core of its own offers it to others: about 100 us.
_SPINS = 2000
#: Polls after which a rank that waits calls the MPI library once: tens of microseconds.
_MISSES = 64


class Place(NamedTuple):
    """Where an array lies: in which window, and how many bytes from its start on this rank."""

    window: int
    offset: int


#: What each rank brought to a meeting.
Meeting = list[bytes]


class Window:
    """Memory with one segment a rank, as this process addresses it.

    On the host, the array that the caller got keeps the own segment alive, and that the window.  On
    a device, the window stays until the ranks release it together.
    """

    def __init__(self, segments: list[Bytes], rank: int, memory: Memory) -> None:
        self.memory = memory
        self.address = memory.address(segments[rank])
        self.nbytes = segments[rank].nbytes
        self.own = weakref.ref(segments[rank])
        self.others = {r: segment for r, segment in enumerate(segments) if r != rank}
        self.lent = segments if isinstance(memory, DeviceMemory) else None

    def segment(self, rank: int) -> Bytes:
        """The memory of ``rank``."""
        segment = self.others.get(rank)
        if segment is None:
            segment = self.own()
        assert segment is not None, "this rank passes memory that it uses"
        return segment


class Windows:
    """Those of a process, by their numbers.

    A window that this rank no longer uses stays until no rank does, as the others' arrays in it are
    read and written through it; but its own part of the memory is given back at once.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._made = 0
        self._kept: dict[int, Window] = {}
        self._unused: set[int] = set()

    def add(self, window: Window, own: Bytes) -> None:
        """Keeps a window; on a host, it is in use until ``own`` is gone."""
        number = self._made
        self._made += 1  # never used again: the same memory may lie in another window later
        self._kept[number] = window
        if window.lent is None:
            address, nbytes = window.address, window.nbytes
            weakref.finalize(own, self._end_use, number, address, nbytes).atexit = False

    def __getitem__(self, number: int) -> Window:
        return self._kept[number]

    def in_use(self) -> list[tuple[int, Window]]:
        """Those that this rank has an array in."""
        return [(n, window) for n, window in [*self._kept.items()] if n not in self._unused]

    def uses(self, number: int) -> bool:
        """Whether this rank has an array in it."""
        return number in self._kept and number not in self._unused

    def forget(self, comm: MPI.Intracomm) -> None:
        """Lets go of those that no rank uses.  Collective."""
        for number in set.intersection(*comm.allgather(set(self._unused))):
            self.drop(number)

    def drop(self, number: int) -> None:
        """Lets go of a window."""
        self._unused.discard(number)
        del self._kept[number]

    def _end_use(self, number: int, address: int, nbytes: int) -> None:
        if os.getpid() != self._process:  # a child that was forked has but a view of it
            return
        self._unused.add(number)
        _libc().madvise(address, nbytes, mmap.MADV_REMOVE)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, length, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [address, length]
    libc.madvise.argtypes = [address, length, ctypes.c_int]
    return libc


class Mapping:
    """Memory of a file, mapped until nothing refers to it.

    Python's own ``mmap`` keeps a file descriptor for as long, and a process has few of them.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        libc = _libc()
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = libc.mmap(None, nbytes, access, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address: int = address
        weakref.finalize(self, libc.munmap, address, nbytes).atexit = False

    def part(self, start: int, nbytes: int) -> Bytes:
        """An array on some of it."""
        return np.asarray(_Part(self, start, nbytes))


class _Part:
    """What an array of a mapping has as its base.

    Views of an array skip the arrays between them and the last base that is no array; so all views
    of a part refer to the part's own array, whose end is the end of its window.
    """

    def __init__(self, mapping: Mapping, start: int, nbytes: int) -> None:
        self.mapping = mapping
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (mapping.address + start, False),
        }


class Epoch:
    """Counts the runs of the plans that use a slot: the counters rise from one to the next."""

    __slots__ = ("base", "following")

    def __init__(self) -> None:
        self.base = 0
        self.following = 0

    def advance(self, ticks: int) -> None:
        """A run begins that counts up to ``ticks - 1``; all ranks must begin the same."""
        self.base = self.following
        self.following += ticks


class Flag:
    """A condition in the shape of a request: a rank's counter has reached a value of this run.

    A rank that waits for it calls ``progress`` now and then, as another may wait for a message of
    the MPI library's that only goes on in a call of the library.
    """

    __slots__ = ("_counters", "_epoch", "_missed", "_polite", "_progress", "_slot", "_value")

    def __init__(
        self,
        counters: memoryview,
        slot: int,
        epoch: Epoch,
        value: int,
        polite: bool,
        progress: Action,
    ) -> None:
        self._counters = counters
        self._slot = slot
        self._epoch = epoch
        self._value = value
        self._polite = polite
        self._progress = progress
        self._missed = 0

    def Start(self) -> None:
        """Nothing to start."""

    def Test(self) -> bool:
        if self._counters[self._slot] >= self._epoch.base + self._value:
            return True
        self._missed += 1
        if self._missed % _MISSES == 0:
            self._progress()
        return False

    def Wait(self) -> None:
        counters, slot, wanted = self._counters, self._slot, self._epoch.base + self._value
        if not self._polite:
            for _ in range(_SPINS):
                if counters[slot] >= wanted:
                    return
        while not self.Test():
            os.sched_yield()

    def Free(self) -> None:
        """Nothing to release."""


class Tick:
    """An action: sets this rank's counter to a value of this run."""

    __slots__ = ("_counters", "_epoch", "_slot", "_value")

    def __init__(self, counters: memoryview, slot: int, epoch: Epoch, value: int) -> None:
        self._counters = counters
        self._slot = slot
        self._epoch = epoch
        self._value = value

    def __call__(self) -> None:
        self._counters[self._slot] = self._epoch.base + self._value


class NodeMemory:
    """Memory that the ranks of ``comm``, all on one node, can address.  Making it is collective.

    On the host it is anonymous: no file names it, so nothing is left behind however the job ends,
    and it goes when the last array in it does.  The flags are there, whatever the arrays are in.

    Raises:
        InvalidBuffer: on all ranks, if one cannot open another's memory, or on a processor that is
            not x86-64.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise InvalidBuffer("shared-memory collectives need x86-64's ordering of stores")
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.windows = Windows()
        self.slots = Lanes(SLOTS - BLOCKING - 1)
        control = self._allocate((SLOTS * _LINE + 2 * WORDS) * 8)
        self._counters = [memoryview(segment.data).cast("q") for segment in control]
        self._epochs = [Epoch() for _ in range(SLOTS)]
        # With a core each, polling is the fastest wait; without, it keeps the awaited from running.
        self._polite = comm.size > (os.cpu_count() or 1)
        self._meetings = 0
        # Nobody sends itself such a message, so the library looks at all that it has to do.
        tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
        self._progress = partial(comm.Iprobe, comm.rank, tag)
        self._arrivals = [self.flag(rank, MEETING, 1) for rank in range(comm.size)]

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, memory: Memory = HOST) -> Items:
        """A new array of zeros on every rank, of the same or of another shape.  Collective.

        Raises:
            InvalidBuffer: on all ranks, if one cannot address another's.
            MemoryError: on all ranks, if the node has less memory than all of them ask for.
        """
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        self.windows.forget(self.comm)
        if isinstance(memory, DeviceMemory):
            segments = cuda_ipc.exchange(self.comm, memory, nbytes)
        else:
            segments = self._allocate(nbytes)
        own = segments[self.rank]
        own[...] = 0  # touched by its owner first, so that its pages lie near it
        self.windows.add(Window(segments, self.rank, memory), own)
        self.comm.Barrier()
        return own[:nbytes].view(kind).reshape(shape)

    def close(self) -> None:
        """Lets go of the other ranks' device memory; arrays on the host stay.  Collective."""
        for number, window in self.windows.in_use():
            if isinstance(window.memory, DeviceMemory) and window.lent is not None:
                cuda_ipc.release(self.comm, window.memory, window.lent)
                self.windows.drop(number)

    def flag(self, rank: int, slot: int, value: int) -> Flag:
        """The condition that ``rank`` has counted up to ``value`` in this run of ``slot``."""
        counters, epoch = self._counters[rank], self._epochs[slot]
        return Flag(counters, slot * _LINE, epoch, value, self._polite, self._progress)

    def tick(self, slot: int, value: int) -> Tick:
        """The action that sets this rank's count."""
        return Tick(self._counters[self.rank], slot * _LINE, self._epochs[slot], value)

    def meet(self, words: Sequence[int], idle: Action | None) -> Meeting:
        """Waits for all ranks to call this, and returns what each of them brought.

        Args:
            words: at most ``WORDS`` integers.
            idle: called while waiting, if something else is under way that the others may need.
        """
        self._epochs[MEETING].advance(2)
        self._meetings += 1
        # The next meeting uses the other half: a rank may come to it before all have read this one.
        first = SLOTS * _LINE + WORDS * (self._meetings % 2)
        own = self._counters[self.rank]
        for i, word in enumerate(words, first):
            own[i] = word
        self.tick(MEETING, 1)()
        for flag in self._arrivals:
            while idle is not None and not flag.Test():
                idle()
            flag.Wait()
        return [bytes(counters[first : first + WORDS]) for counters in self._counters]

    def advance(self, slot: int, ticks: int) -> Action:
        """The action that begins a run."""
        return partial(self._epochs[slot].advance, ticks)

    def locate(self, address: int, nbytes: int) -> Place | None:
        """Where so much memory lies, or ``None`` if it is ordinary."""
        for number, window in self.windows.in_use():
            offset = address - window.address
            if offset >= 0 and offset + nbytes <= window.nbytes:
                return Place(number, offset)
        return None

    def view(self, rank: int, place: Place, count: int, dtype: np.dtype[Any]) -> Items:
        """``count`` items at ``place`` of ``rank``."""
        segment = self.windows[place.window].segment(rank)
        return segment[place.offset : place.offset + count * dtype.itemsize].view(dtype)

    def _allocate(self, nbytes: int) -> list[Bytes]:
        """One segment a rank, of ``nbytes`` there, in one anonymous file that all of them map."""
        lengths = self.comm.allgather(-(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if sum(lengths) > there:
            raise MemoryError(
                f"the ranks ask for {sum(lengths)} bytes of shared memory, but their node has "
                f"{there}"
            )
        descriptor, problem = -1, None
        try:
            if self.rank == 0:
                descriptor = os.memfd_create("collectives")
                os.truncate(descriptor, sum(lengths))
        except OSError as error:
            problem = f"rank {self.rank}: {error}"
        path = self.comm.bcast(f"/proc/{os.getpid()}/fd/{descriptor}")
        try:
            if self.rank != 0:
                descriptor = os.open(path, os.O_RDWR)
            memory = Mapping(descriptor, sum(lengths))
        except OSError as error:
            problem = f"rank {self.rank}: {error}"
        problems = [told for told in self.comm.allgather(problem) if told]
        if descriptor >= 0:
            os.close(descriptor)
        if problems:
            raise InvalidBuffer(f"the ranks cannot share memory: {'; '.join(problems)}")
        ends = np.cumsum(lengths)
        return [memory.part(end - length, length) for length, end in zip(lengths, ends.tolist())]
