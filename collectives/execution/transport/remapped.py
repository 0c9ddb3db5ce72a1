"""An ordinary array in the ranks' shared memory, under the address that it has.

The whole pages of the array are replaced by shared ones (``mmap`` at their address), so every name,
view and pointer of it stays right.  The bytes before its first and after its last whole page lie on
pages with other data: they stay private, and the peers use a copy, which a collective refreshes
before and brings back after (:class:`~collectives.execution.transport.windows.Edge`).

Whoever allocated the memory goes on to own it.  When the owner is about to free it, or the
communicator is closed, private pages with the same contents take the place of the shared ones.
"""

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from mmap import PAGESIZE

from collectives.execution.memory import HOST
from collectives.execution.plan import Plan
from collectives.execution.transport import Bytes
from collectives.execution.transport.extent import Extent, begin
from collectives.execution.transport.pages import bytes_at, discard, make_private, put, regions
from collectives.execution.transport.windows import Edge, Window

log = logging.getLogger("collectives")


class Adopted(Window):
    """The ranks' arrays of one call of ``Communicator.share``.

    Args:
        segments: the ranks' memory; each begins as far from the start of a page as its array.
        own: the array.

    Attributes:
        first, last: address of the first whole page, and the one behind the last.
        file: the kernel's number of the file that these are mapped from; 0 for none.
    """

    has_edges = True

    def __init__(self, segments: list[Bytes], rank: int, own: Extent) -> None:
        super().__init__(segments, rank, HOST)
        self._own = segments[rank]
        self.address = own.address
        self._owner = weakref.ref(own.owner)
        #: Keeps memory of Python's, which goes with the last reference to it.
        self._base = own.base
        self._begin = begin(own.owner)
        self.first, self.last = own.pages
        #: Address of the own segment.
        self._shared = HOST.address(segments[rank])
        self.file = 0
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()

    def adopt(self, descriptor: int, offset: int) -> None:
        """Moves the array into its segment, which begins at byte ``offset`` of a file.

        Raises:
            OSError: it cannot be; nothing has changed.
        """
        nbytes = self.last - self.first
        source = self._shared + self.first - self.address
        if self.nbytes:
            self._own[...] = bytes_at(self.address, self.nbytes, keeps=None)
        if nbytes:
            (found,) = regions(source, source + 1)
            self.file = found.file
            _LIVE.add(self)
            put(descriptor, offset + source - self._shared, nbytes, self.first)

    @property
    def is_there(self) -> bool:
        """Whether the array's memory is still its owner's, where it was."""
        owner = self._owner()
        return owner is not None and begin(owner) == self._begin

    def segment(self, rank: int) -> Bytes:
        """The memory of ``rank``; the own keeps the array alive."""
        if rank in self.others:
            return self.others[rank]
        return bytes_at(self._shared, self.nbytes, keeps=(self._own, self._owner()))

    def edges(self, offset: int, nbytes: int) -> list[Edge]:
        found, owner, segment = [], self._owner(), self.segment(self.rank)
        head, tail = self.first - self.address, self.last - self.address
        for start, stop in ((0, head), (tail, self.nbytes)):
            start, stop = max(start, offset), min(stop, offset + nbytes)
            if start < stop:
                outside = bytes_at(self.address + start, stop - start, keeps=owner)
                found.append(Edge(outside, segment[start:stop]))
        return found

    def used_by(self, plan: Plan) -> None:
        self._plans.add(plan)

    def end(self) -> None:
        """The owner is about to free the memory, or is alive and has freed it, as PyTorch's
        ``share_memory_()`` does: then another thread may write there, and its pages stay."""
        if self._base is None and self._owner() is not None:
            self._free_plans()
            _KEPT.append(self)
        else:
            self.give_back()

    def _free_plans(self) -> None:
        for plan in [*self._plans]:
            (plan.abandon if plan.is_underway else plan.Free)()

    def give_back(self) -> None:
        """Private pages take the place of the shared ones; plans that used these are freed."""
        self._free_plans()
        try:
            for first, last in restore([self]):  # never are there two copies of the whole array
                discard(self._shared + first - self.address, last - first)
        except OSError as error:
            log.warning("an array stays on shared pages: %s", error)
            _KEPT.append(self)
            return
        start = self._shared // PAGESIZE * PAGESIZE
        discard(start, self._shared + self.nbytes - start)
        self._base = None


def restore(windows: Iterable[Adopted]) -> Iterator[tuple[int, int]]:
    """Private pages with the same contents in the place of the shared ones, where these are still
    there, piece by piece; the bounds of each piece that is done.

    Raises:
        OSError: there is no memory for them; those that are not replaced stay shared.
    """
    pages = {window.file: window for window in windows if window.file}
    if not pages:
        return
    least = min(window.first for window in pages.values())
    most = max(window.last for window in pages.values())
    for region in [*regions(least, most)]:
        if (window := pages.get(region.file)) is not None:
            start, stop = max(region.start, window.first), min(region.stop, window.last)
            if start < stop:
                yield from make_private(start, stop)
    for window in pages.values():
        _LIVE.discard(window)


#: The arrays of this process: what a child process sees is the same for all communicators.
_LIVE: "weakref.WeakSet[Adopted]" = weakref.WeakSet()
#: Windows that have ended and whose pages stay: a child process gets its own.
_KEPT: list[Adopted] = []


def reclaim(own: Extent) -> None:
    """Private pages for an array, whose owner is alive, where it lies on pages that have stayed.

    Raises:
        OSError: there is no memory for them.
    """
    files = {window.file for window in _KEPT}
    for region in [*regions(*own.pages)] if files else ():
        if region.file in files:
            for _ in make_private(region.start, region.stop):
                pass


class _Forks(threading.local):
    """For each fork that this thread is in, the pipe by which the child says that it is ready; a
    signal's handler may fork while another fork is under way."""

    def __init__(self) -> None:
        self.pipes: list[tuple[int, int] | None] = []


_FORKS = _Forks()


def _before_fork() -> None:
    _FORKS.pipes.append(None)
    if _LIVE:
        with suppress(OSError):  # without one the child has its own pages, if a little later
            _FORKS.pipes[-1] = os.pipe()


def _in_parent() -> None:
    """Waits until the child has its own pages: until then it must see no change."""
    if (pipe := _FORKS.pipes.pop()) is not None:
        reading, writing = pipe
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)


def _in_child() -> None:
    """The child's arrays are its own, as after any fork."""
    pipe = _FORKS.pipes.pop()
    try:
        if pipe is not None:
            os.close(pipe[0])
        for _ in restore([*_LIVE]):
            pass
        if pipe is not None:
            os.write(pipe[1], b".")
            os.close(pipe[1])
    except BaseException as error:
        os.write(2, f"collectives: a child cannot have its own arrays: {error!r}\n".encode())
        os._exit(1)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
