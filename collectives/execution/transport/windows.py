"""Memory that a rank shares, by windows: each has one segment a rank, mapped by all of them."""

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from collectives.execution.memory import HOST, Memory, is_queued
from collectives.execution.transport import Bytes
from collectives.execution.transport.pages import discard

if TYPE_CHECKING:
    from mpi4py import MPI


class Place(NamedTuple):
    """Where an array lies: in which window, and how many bytes from its start on this rank."""

    window: int
    offset: int


#: For each rank, where its send and its receive buffer lie; ``None``: in place, or it has none.
Places = tuple[tuple[Place | None, Place | None], ...]


class Window:
    """Memory with one segment a rank, as this process addresses it.

    On the host, the array that the caller got keeps the own segment alive, and that the window.  On
    a device, the window stays until the ranks release it together.

    Attributes:
        rank: this one.
        memory: the kind of memory.
        address, nbytes: bounds of the own segment.
        lent: all segments of device memory; ``None`` on the host.
    """

    def __init__(self, segments: list[Bytes], rank: int, memory: Memory) -> None:
        self.rank = rank
        self.memory = memory
        self.address = memory.address(segments[rank])
        self.nbytes = segments[rank].nbytes
        self.own = weakref.ref(segments[rank])
        self.others = {r: segment for r, segment in enumerate(segments) if r != rank}
        self.lent = segments if is_queued(memory) else None
        #: Keeps the mapping, which an array lets go of before its end is told.
        self._mapping = None if self.lent else segments[rank].base

    def segment(self, rank: int) -> Bytes:
        """The memory of ``rank``."""
        segment = self.others.get(rank)
        if segment is None:
            segment = self.own()
        assert segment is not None, "this rank passes memory that it uses"
        return segment

    @property
    def is_there(self) -> bool:
        """Whether the own segment still lies at its address."""
        return True

    def end(self) -> None:
        """The own segment is used no more: gives its memory back."""
        discard(self.address, self.nbytes)


class Moved(Window):
    """Storages of torch's, which torch has moved; this process maps its own a second time."""

    def __init__(self, segments: list[Bytes], rank: int, storage: Any) -> None:
        super().__init__(segments, rank, HOST)
        self.others[rank] = segments[rank]
        self.address = storage.data_ptr()
        self._storage = weakref.ref(storage)

    @property
    def is_there(self) -> bool:
        storage = self._storage()
        return storage is not None and storage.data_ptr() == self.address

    def end(self) -> None:
        discard(HOST.address(self.others[self.rank]), self.nbytes)


class Windows:
    """The windows of a process, by their numbers.

    A window that this rank no longer uses stays until no rank does, as the others' arrays in it are
    read and written through it; but its own part of the memory is given back at once.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._made = 0
        self._kept: dict[int, Window] = {}
        self._unused: set[int] = set()
        self._ends: dict[int, weakref.finalize[..., object]] = {}

    def add(self, window: Window, owner: object) -> None:
        """Keeps a window; on a host, it is in use until ``owner`` is gone."""
        number = self._made
        self._made += 1  # never used again: the same memory may lie in another window later
        self._kept[number] = window
        if window.lent is None:
            self._ends[number] = weakref.finalize(owner, self._end_use, number, window.end)
            self._ends[number].atexit = False

    def __getitem__(self, number: int) -> Window:
        return self._kept[number]

    def in_use(self) -> list[tuple[int, Window]]:
        """The windows that this rank has an array in."""
        return [(n, self._kept[n]) for n in [*self._kept] if self.uses(n)]

    def uses(self, number: int) -> bool:
        """Whether this rank has an array in it."""
        if number < 0 or number in self._unused or number not in self._kept:
            return False
        if not self._kept[number].is_there:
            # Its owner has freed the memory, and may live on: what lies there is another one's.
            self._ends[number]()
            self._unused.add(number)
        return number not in self._unused

    def forget(self, comm: "MPI.Intracomm") -> None:
        """Lets go of windows that no rank uses.  Collective."""
        self.in_use()  # looks whether they are there
        for number in set.intersection(*comm.allgather(set(self._unused))):
            self.drop(number)

    def drop(self, number: int) -> None:
        """Lets go of a window."""
        if (end := self._ends.pop(number, None)) is not None:
            end.detach()
        self._unused.discard(number)
        del self._kept[number]

    def _end_use(self, number: int, end: Callable[[], None]) -> None:
        if os.getpid() != self._process:  # a child that was forked has but a view of it
            return
        self._unused.add(number)
        end()
