"""Memory of one node that all its ranks can address, and flags in it to synchronise by.

Flags are counters, each written by one rank and polled by the others.  Plain loads and stores do,
because x86-64 keeps stores in order; on another machine they would need fences that Python lacks.
"""

import mmap
import os
import platform
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.errors import InvalidBuffer
from collectives.memory import HOST, DeviceMemory, Items, Memory
from collectives.plan import Action
from collectives.transport import Bytes, cuda_ipc

_LINE = 8  # a cache line in 8-byte words: two ranks never write to the same one
#: Plans in flight at a time that can be told apart.
SLOTS = 512
#: The slot of :meth:`NodeMemory.meet`, and how many 8-byte words each rank can bring to it.
MEETING = 0
WORDS = 4
#: Polls before a rank with a core of its own offers it to others: about 100 us.
_SPINS = 2000


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
        assert segment is not None, "a window is dropped with its own segment"
        return segment


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
    """A condition in the shape of a request: a rank's counter has reached a value of this run."""

    __slots__ = ("_counters", "_epoch", "_polite", "_slot", "_value")

    def __init__(
        self, counters: memoryview, slot: int, epoch: Epoch, value: int, polite: bool
    ) -> None:
        self._counters = counters
        self._slot = slot
        self._epoch = epoch
        self._value = value
        self._polite = polite

    def Start(self) -> None:
        """Nothing to start."""

    def Test(self) -> bool:
        return self._counters[self._slot] >= self._epoch.base + self._value

    def Wait(self) -> None:
        counters, slot, wanted = self._counters, self._slot, self._epoch.base + self._value
        if not self._polite:
            for _ in range(_SPINS):
                if counters[slot] >= wanted:
                    return
        while counters[slot] < wanted:
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
        self._windows: dict[int, Window] = {}
        self._made = 0
        control = self._allocate((SLOTS * _LINE + 2 * WORDS) * 8)
        self._counters = [memoryview(segment.data).cast("q") for segment in control]
        self._epochs = [Epoch() for _ in range(SLOTS)]
        # With a core each, polling is the fastest wait; without, it keeps the awaited from running.
        self._polite = comm.size > (os.cpu_count() or 1)
        self._meetings = 0
        self._arrivals = [self.flag(rank, MEETING, 1) for rank in range(comm.size)]

    def empty(self, shape: Any, dtype: npt.DTypeLike, memory: Memory = HOST) -> Items:
        """A new array of zeros on every rank, of the same or of another shape.  Collective.

        Raises:
            InvalidBuffer: on all ranks, if one cannot address another's.
        """
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if isinstance(memory, DeviceMemory):
            segments = cuda_ipc.exchange(self.comm, memory, nbytes)
        else:
            segments = self._allocate(nbytes)
        own = segments[self.rank]
        own[...] = 0  # touched by its owner first, so that its pages lie near it
        number = self._made
        self._made += 1
        self._windows[number] = Window(segments, self.rank, memory)
        if memory is HOST:
            weakref.finalize(own, self._windows.pop, number, None).atexit = False
        self.comm.Barrier()
        return own[:nbytes].view(kind).reshape(shape)

    def close(self) -> None:
        """Lets go of the other ranks' device memory; arrays on the host stay.  Collective."""
        for number, window in [*self._windows.items()]:
            if isinstance(window.memory, DeviceMemory) and window.lent is not None:
                cuda_ipc.release(self.comm, window.memory, window.lent)
                del self._windows[number]

    def flag(self, rank: int, slot: int, value: int) -> Flag:
        """The condition that ``rank`` has counted up to ``value`` in this run of ``slot``."""
        return Flag(self._counters[rank], slot * _LINE, self._epochs[slot], value, self._polite)

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
        for number, window in self._windows.items():
            offset = address - window.address
            if offset >= 0 and offset + nbytes <= window.nbytes:
                return Place(number, offset)
        return None

    def window(self, place: Place) -> Window:
        """That of ``place``.

        Raises:
            InvalidBuffer: if this rank's array in it is gone, and the window with it.
        """
        window = self._windows.get(place.window)
        if window is None:
            raise InvalidBuffer(
                f"another rank passes its array of Communicator.empty number {place.window}, which "
                "this rank has dropped; pass arrays of the same call on all ranks, or keep them"
            )
        return window

    def view(self, rank: int, place: Place, count: int, dtype: np.dtype[Any]) -> Items:
        """``count`` items at ``place`` of ``rank``."""
        segment = self.window(place).segment(rank)
        return segment[place.offset : place.offset + count * dtype.itemsize].view(dtype)

    def _allocate(self, nbytes: int) -> list[Bytes]:
        """One segment a rank, of ``nbytes`` there, in one anonymous file that all of them map."""
        lengths = self.comm.allgather(-(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
        descriptor, problem = -1, None
        try:
            if self.rank == 0:
                descriptor = os.memfd_create("collectives")
                os.truncate(descriptor, sum(lengths))
            path = self.comm.bcast(f"/proc/{os.getpid()}/fd/{descriptor}")
            if self.rank != 0:
                descriptor = os.open(path, os.O_RDWR)
            memory = mmap.mmap(descriptor, sum(lengths))
        except OSError as error:
            problem = f"rank {self.rank}: {error}"
        problems = [told for told in self.comm.allgather(problem) if told]
        if descriptor >= 0:
            os.close(descriptor)
        if problems:
            raise InvalidBuffer(f"the ranks cannot share memory: {'; '.join(problems)}")
        ends = np.cumsum(lengths)
        return [
            np.frombuffer(memory, np.uint8, length, end - length)
            for length, end in zip(lengths, ends.tolist())
        ]
