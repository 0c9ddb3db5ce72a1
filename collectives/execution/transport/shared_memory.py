"""Memory of one node that all its ranks can address, and flags in it to synchronise by."""

import mmap
import os
import platform
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives import extras
from collectives.errors import InvalidBuffer
from collectives.execution.memory import HOST, Items, Memory, is_queued
from collectives.execution.plan import Action
from collectives.execution.tags import TagPool
from collectives.execution.transport import WORDS, Bytes, Meeting
from collectives.execution.transport.flags import BLOCKING, MEETING, Flag, RunCount, Tick
from collectives.execution.transport.mpi import largest_tag
from collectives.execution.transport.pages import Mapping
from collectives.execution.transport.windows import Moved, Place, Window, Windows
from collectives.files import anonymous

_LINE = 8  # a cache line in 8-byte words: two ranks never write to the same one
#: Plans in flight at a time that can be told apart.
SLOTS = 512


class Fences:
    """Full memory fences, for processors that are not x86-64: call it for one.

    Making and closing it are collective.

    Python has none of its own; MPI's ``Win_sync`` on a window of shared memory is one: "the
    synchronization of the private and public copies" of what is in it (MPI 4.1, 12.7), which the
    libraries do by a full barrier of the processor.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._window = MPI.Win.Allocate_shared(8, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._sync = self._window.Sync

    def __call__(self) -> None:
        self._sync()

    def close(self) -> None:
        """Frees the window.  Collective."""
        self._window.Unlock_all()
        self._window.Free()


class NodeMemory:
    """Memory that the ranks of ``comm``, all on one node, can address.  Making it is collective.

    On the host it is anonymous: no file names it, so nothing is left behind however the job ends,
    and it goes when the last array in it does.  The flags are there, whatever the arrays are in.

    Raises:
        InvalidBuffer: on all ranks, if one cannot open another's memory.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.windows = Windows()
        self.slots = TagPool(SLOTS - BLOCKING - 1)
        control = self.allocate((SLOTS * _LINE + 2 * WORDS) * 8)
        self._counters = [memoryview(segment.data).cast("q") for segment in control]
        self.runs = [RunCount() for _ in range(SLOTS)]
        self._fences = None if platform.machine() in ("x86_64", "AMD64") else Fences(comm)
        # With a core each, polling is the fastest wait; without, it keeps the awaited from running.
        cores = set[int]().union(*comm.allgather(os.sched_getaffinity(0)))
        self._polite = comm.size > len(cores)
        # Two boards, as a rank may come to the next meeting before all have read those of this one.
        self._boards: list[list[memoryview]] = []
        for first in (SLOTS * _LINE, SLOTS * _LINE + WORDS):
            self._boards.append([words[first : first + WORDS] for words in self._counters])
        self._written: list[tuple[int, ...]] = [(), ()]
        self._board = 0
        self._arrive = self.tick(MEETING, 1)
        others = (rank for rank in range(comm.size) if rank != comm.rank)
        self._arrivals = [self.flag(rank, MEETING, 1) for rank in others]

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, memory: Memory = HOST) -> Items:
        """A new array of zeros on every rank, of the same or of another shape.  Collective.

        Raises:
            InvalidBuffer: on all ranks, if one cannot address another's.
            MemoryError: on all ranks, if the node has less memory than all of them ask for.
        """
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        self.windows.forget(self.comm)
        if is_queued(memory):
            segments = extras.exchange(self.comm, memory, nbytes)
        else:
            segments = self.allocate(nbytes)
            segments[self.rank][...] = 0  # by its owner first, so that its pages lie near it
        own = segments[self.rank]
        self.windows.add(Window(segments, self.rank, memory), own)
        self.comm.Barrier()
        return own[:nbytes].view(kind).reshape(shape)

    def move(self, storage: Any) -> None:
        """Has torch move a storage of each rank, of any size, into shared memory.  Collective.

        Raises:
            InvalidBuffer: on all ranks, if one has no room, or cannot address another's.
        """
        self.windows.forget(self.comm)
        problem, segments = None, []
        descriptor, nbytes = -1, 0
        try:  # torch moves it into a file without a name
            descriptor, nbytes = storage._share_fd_cpu_()
        except RuntimeError as error:  # /dev/shm is full
            problem = f"rank {self.rank}: {error}"
        for path, length in self.comm.allgather((_path(descriptor), nbytes)):
            try:
                segments.append(Mapping(path, length).part(0, length))
            except OSError as error:
                problem = problem or f"rank {self.rank}: {error}"
        self._agree(problem)
        self.windows.add(Moved(segments, self.rank, storage), storage)

    def close(self) -> None:
        """Lets go of the other ranks' device memory and storages; arrays of :meth:`empty` on the
        host stay.  Collective."""
        for number, window in self.windows.in_use():
            if is_queued(window.memory) and window.lent is not None:
                extras.release(self.comm, window.memory, window.lent)
                self.windows.drop(number)
            elif isinstance(window, Moved):
                self.windows.drop(number)
        if self._fences:
            self._fences.close()

    def _progress(self) -> None:
        """Calls the library while the communicator is there, which plans may outlive."""
        if self.comm:
            # Nobody sends itself such a message, so the library looks at all that it has to do.
            self.comm.Iprobe(self.rank, largest_tag())

    def flag(self, rank: int, slot: int, value: int, runs: RunCount | None = None) -> Flag:
        """The condition that ``rank`` has counted up to ``value``, in this run of ``slot`` or from
        the base of ``runs``."""
        counters, at = self._counters[rank], slot * _LINE
        waiting = self._polite, self._progress
        return Flag(counters, at, runs or self.runs[slot], value, *waiting, self._fences)

    def tick(self, slot: int, value: int) -> Tick:
        """The action that sets this rank's count."""
        counters, at = self._counters[self.rank], slot * _LINE
        return Tick(counters, at, self.runs[slot], value, self._fences)

    def meet(self, words: tuple[int, ...], idle: Action | None) -> Meeting:
        """Waits for all ranks to call this, and returns what each of them brought.

        Args:
            words: at most ``WORDS`` integers.
            idle: called while waiting, if something else is under way that the others may need.
        """
        self.runs[MEETING].advance(2)
        number = self._board = 1 - self._board
        if words != self._written[number]:
            own = self._boards[number][self.rank]
            for i, word in enumerate(words):
                own[i] = word
            self._written[number] = words
        self._arrive()
        for flag in self._arrivals:
            while idle is not None and not flag.Test():
                idle()
            flag.Wait()
        return [bytes(brought) for brought in self._boards[number]]

    def advance(self, slot: int, ticks: int) -> Action:
        """The action that begins a run."""
        return partial(self.runs[slot].advance, ticks)

    def locate(self, address: int, nbytes: int) -> Place | None:
        """Place of ``nbytes`` of memory; ``None`` if it is ordinary."""
        for number, window in self.windows.in_use():
            offset = address - window.address
            if offset >= 0 and offset + nbytes <= window.nbytes:
                return Place(number, offset)
        return None

    def view(self, rank: int, place: Place, count: int, dtype: np.dtype[Any]) -> Items:
        """``count`` items at ``place`` of ``rank``."""
        segment = self.windows[place.window].segment(rank)
        return segment[place.offset : place.offset + count * dtype.itemsize].view(dtype)

    def allocate(self, nbytes: int) -> list[Bytes]:
        """One segment a rank, of ``nbytes`` there, of an anonymous file that all ranks map.
        Collective; errors as of :meth:`empty`."""
        lengths = self.comm.allgather(-(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if sum(lengths) > there:
            raise MemoryError(
                f"the ranks ask for {sum(lengths)} bytes of shared memory, but their node has "
                f"{there}"
            )
        descriptor, problem, mark = -1, None, os.urandom(16)
        try:
            if self.rank == 0:
                descriptor = anonymous("collectives")
                os.pwrite(descriptor, mark, sum(lengths))  # behind all segments
        except OSError as error:
            problem = f"rank 0: {error}"
        path, mark = self.comm.bcast((None if problem else _path(descriptor), mark))
        try:
            if path is not None:
                descriptor = os.open(path, os.O_RDWR) if self.rank != 0 else descriptor
                # In another container or on another host, it may be any file of the program's.
                if os.pread(descriptor, len(mark), sum(lengths)) != mark:
                    raise OSError(f"{path} is another file here")
                memory = Mapping(_path(descriptor), sum(lengths))
        except OSError as error:
            problem = f"rank {self.rank}: {error}"
        try:
            self._agree(problem)
            begins = [0, *accumulate(lengths[:-1])]
            return [memory.part(begin, length) for begin, length in zip(begins, lengths)]
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _agree(self, problem: str | None) -> None:
        """Raises :class:`InvalidBuffer` on all ranks if one has a problem.  Collective."""
        problems = [told for told in self.comm.allgather(problem) if told]
        if problems:
            raise InvalidBuffer(f"the ranks cannot share memory: {'; '.join(problems)}")


def _path(descriptor: int) -> str:
    """A name by which other processes can open a file of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
