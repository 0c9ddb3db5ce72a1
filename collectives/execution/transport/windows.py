"""Memory that a rank shares, by windows: each has one segment a rank, mapped by all of them."""

import ctypes
import mmap
import os
import weakref

import numpy as np
from mpi4py import MPI

from collectives.execution.memory import DeviceMemory, Memory
from collectives.execution.transport import Bytes


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
