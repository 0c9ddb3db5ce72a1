"""The pages of a file in this process: mapped, and given back.

Python's own ``mmap`` keeps a file descriptor for as long as the mapping, and a process has few of
them.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

from collectives.execution.transport import Bytes

_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE


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

    def __init__(self, path: str, nbytes: int) -> None:
        libc = _libc()
        descriptor = os.open(path, os.O_RDWR)
        try:
            self.address = _expect(libc.mmap(None, nbytes, _ACCESS, mmap.MAP_SHARED, descriptor, 0))
        finally:
            os.close(descriptor)
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


def discard(address: int, nbytes: int) -> None:
    """Gives the memory of whole shared pages back, which stay mapped, and read as zeros."""
    _libc().madvise(address, nbytes, mmap.MADV_REMOVE)
