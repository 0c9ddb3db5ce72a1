"""Memory of one node that all its ranks can address, and flags in it to synchronise by.

Flags are counters, each written by one rank and polled by the others.  Plain loads and stores do,
because x86-64 keeps stores in order; on another machine they would need fences that Python lacks.
"""

import os
import platform
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.errors import InvalidBuffer
from collectives.plan import Action

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


class Window(NamedTuple):
    """A window with one segment a rank, each as this process addresses it."""

    handle: MPI.Win
    segments: list[npt.NDArray[np.uint8]]


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
    """Windows over ``comm``, whose ranks must all be on one node.  Making one is collective.

    Raises:
        InvalidBuffer: on a processor that is not x86-64.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise InvalidBuffer("shared-memory collectives need x86-64's ordering of stores")
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.windows: list[Window] = []
        control = self._allocate((SLOTS * _LINE + 2 * WORDS) * 8)
        self._counters = [memoryview(segment.data).cast("q") for segment in control.segments]
        self._epochs = [Epoch() for _ in range(SLOTS)]
        # With a core each, polling is the fastest wait; without, it keeps the awaited from running.
        self._polite = comm.size > (os.cpu_count() or 1)
        self._meetings = 0
        self._arrivals = [self.flag(rank, MEETING, 1) for rank in range(comm.size)]

    def empty(self, shape: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A new array on every rank, of the same or of another shape.  Collective."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        window = self._allocate(nbytes)
        return window.segments[self.rank][:nbytes].view(kind).reshape(shape)

    def flag(self, rank: int, slot: int, value: int) -> Flag:
        """The condition that ``rank`` has counted up to ``value`` in this run of ``slot``."""
        return Flag(self._counters[rank], slot * _LINE, self._epochs[slot], value, self._polite)

    def tick(self, slot: int, value: int) -> Tick:
        """The action that sets this rank's count."""
        return Tick(self._counters[self.rank], slot * _LINE, self._epochs[slot], value)

    def meet(self, words: Sequence[int]) -> list[bytes]:
        """Waits for all ranks to call this, and returns what each of them brought.

        Args:
            words: at most ``WORDS`` integers.
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
            flag.Wait()
        return [bytes(counters[first : first + WORDS]) for counters in self._counters]

    def advance(self, slot: int, ticks: int) -> Action:
        """The action that begins a run."""
        return partial(self._epochs[slot].advance, ticks)

    def locate(self, items: npt.NDArray[Any]) -> Place | None:
        """Where ``items`` lies, or ``None`` if it is ordinary memory."""
        address = items.__array_interface__["data"][0]
        for number, window in enumerate(self.windows):
            segment = window.segments[self.rank]
            offset = address - segment.__array_interface__["data"][0]
            if offset >= 0 and offset + items.nbytes <= segment.nbytes:
                return Place(number, offset)
        return None

    def view(self, rank: int, place: Place, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """``count`` items at ``place`` of ``rank``."""
        segment = self.windows[place.window].segments[rank]
        return segment[place.offset : place.offset + count * dtype.itemsize].view(dtype)

    def free(self) -> None:
        """Frees the windows; arrays in them must not be used any more.  Collective."""
        self._counters = []
        while self.windows:
            handle, segments = self.windows.pop()
            segments.clear()
            handle.Unlock_all()
            handle.Free()

    def _allocate(self, nbytes: int) -> Window:
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        handle = MPI.Win.Allocate_shared(max(nbytes, 64), 1, info, self.comm)
        info.Free()
        handle.Lock_all(MPI.MODE_NOCHECK)
        segments = []
        for rank in range(self.size):
            memory, _ = handle.Shared_query(rank)
            segments.append(np.asarray(memory))
        segments[self.rank][:] = 0  # touched by its owner: pages lie near it
        self.comm.Barrier()
        window = Window(handle, segments)
        self.windows.append(window)
        return window
