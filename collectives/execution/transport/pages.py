"""The pages of this process: mapped from a file, put in the place of others, given back.

Python's own ``mmap`` keeps a file descriptor for as long as the mapping, and a process has few of
them; nor can it map at an address.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from collectives.execution.transport import Bytes

_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
#: Memory beside the array's own while its pages change hands.
_PIECE_BYTES = 4 << 20


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, length, *[number] * 3, ctypes.c_long]
    libc.munmap.argtypes = [address, length]
    libc.madvise.argtypes = [address, length, number]
    return libc


def _expect(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


class Mapping:
    """Memory of a file, mapped until nothing refers to it.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        libc = _libc()
        self.address = _expect(libc.mmap(None, nbytes, _ACCESS, mmap.MAP_SHARED, descriptor, 0))
        weakref.finalize(self, libc.munmap, self.address, nbytes).atexit = False

    def part(self, start: int, nbytes: int) -> Bytes:
        """An array on ``nbytes`` from ``start`` on."""
        return bytes_at(self.address + start, nbytes, keeps=self)


def bytes_at(address: int, nbytes: int, keeps: object) -> Bytes:
    """An array on memory that is there for as long as the object ``keeps`` is."""
    return np.asarray(SharedMemory(address, nbytes, keeps))


class SharedMemory:
    """The base of such an array.

    Views of an array skip the arrays between them and the last base that is no array; so all views
    of a part refer to the part's own array, whose end is the end of its window.
    """

    def __init__(self, address: int, nbytes: int, keeps: object) -> None:
        self.keeps = keeps
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


class Region(NamedTuple):
    """Some pages, and what they are mapped from: ``file`` is 0 for none."""

    start: int
    stop: int
    access: str
    file: int
    name: str

    @property
    def is_ordinary(self) -> bool:
        """Whether it is memory as ``malloc`` has it, of this process alone."""
        return self.access.startswith("rw") and self.access.endswith("p") and not self.file


def regions(start: int, stop: int) -> Iterator[Region]:
    """The pages from ``start`` to ``stop``, without those that are not mapped."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            bounds, access, _, _, file, *rest = line.split(maxsplit=5)
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            if first >= stop:  # they are in order
                return
            if start < last:
                name = "".join(rest).strip()
                yield Region(max(first, start), min(last, stop), access, int(file), name)


def put(descriptor: int, offset: int, nbytes: int, target: int) -> None:
    """Whole pages of a file are at ``target``, in the place of what was there.

    ``mremap`` would need no file.  But UCX before 1.15 puts a function of its own in its place,
    which loses the target, and pages land anywhere; and none tells UCX that those there are gone.

    Raises:
        OSError: they cannot be; nothing has changed.
    """
    kind = mmap.MAP_SHARED | _MAP_FIXED
    _expect(_libc().mmap(target, nbytes, _ACCESS, kind, descriptor, offset))


def make_private(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Pages of this process alone in the place of others, with the same contents, piece by piece;
    the bounds of each piece that is done.

    They are made there, not moved there, as the kernel then counts them to the pages around them.

    Raises:
        OSError: it has no memory for the next piece, which has not changed.
    """
    libc = _libc()
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    most = min(stop - start, _PIECE_BYTES)
    kept = _expect(libc.mmap(None, most, _ACCESS, kind, -1, 0))
    try:
        for first in range(start, stop, most):
            nbytes = min(most, stop - first)
            ctypes.memmove(kept, first, nbytes)
            _expect(libc.mmap(first, nbytes, _ACCESS, kind | _MAP_FIXED, -1, 0))
            ctypes.memmove(first, kept, nbytes)
            yield first, first + nbytes
    finally:
        libc.munmap(kept, most)


def discard(address: int, nbytes: int) -> None:
    """Gives the memory of whole shared pages back, which stay mapped, and read as zeros."""
    _libc().madvise(address, nbytes, mmap.MADV_REMOVE)
