"""What both stand-ins for CuPy share: attributes of arrays, and memory that processes map."""

import mmap
import os
import struct

import numpy as np

#: What memory holds before anything is written there: a number that shows.
POISON = 0xA5
_HANDLE = "iiq48x"


class Flags:
    """CuPy's, which do not say ``writeable``."""

    def __init__(self, flags):
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.owndata, self.forc = flags.owndata, flags.forc


class DeviceArray:
    """Attributes of ``cupy.ndarray``; ``_a`` is the array of the host behind it."""

    __hash__ = None
    __array_priority__ = 100
    __slots__ = ("__weakref__", "_a", "_memory")

    dtype = property(lambda self: self._a.dtype)
    flags = property(lambda self: Flags(self._a.flags))
    itemsize = property(lambda self: self._a.itemsize)
    nbytes = property(lambda self: self._a.nbytes)
    ndim = property(lambda self: self._a.ndim)
    shape = property(lambda self: self._a.shape)
    size = property(lambda self: self._a.size)
    strides = property(lambda self: self._a.strides)

    @property
    def __cuda_array_interface__(self):
        own = self._a.__array_interface__
        return {key: own[key] for key in ("shape", "typestr", "descr")} | {
            "strides": None if self._a.flags.c_contiguous else self._a.strides,
            "data": (own["data"][0] if self._a.size else 0, False),
            "version": 3,
            "stream": 1,
        }

    def __len__(self):
        return len(self._a)

    def __array__(self, *given, **named):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )


class SharedMemory:
    """Allocations that other processes can map, as CUDA IPC maps them.

    Attributes:
        allocated: (descriptor, bytes) of this process's allocations by address.
        mapped: Memory of other processes that this one has mapped, by address.
    """

    def __init__(self):
        self.allocated, self.mapped = {}, {}

    def allocate(self, size):
        """The bytes of a new allocation, and its address."""
        file = os.memfd_create("device memory")
        os.truncate(file, size)
        array, start = _map(file, size)
        self.allocated[start] = file, size
        return array, start

    def free(self, start):
        os.close(self.allocated.pop(start)[0])

    def handle_of(self, start):
        """``ipcGetMemHandle``."""
        if start not in self.allocated:
            raise RuntimeError("cudaErrorInvalidValue: not where an allocation begins")
        return struct.pack(_HANDLE, os.getpid(), *self.allocated[start])

    def opened(self, handle):
        """``ipcOpenMemHandle``."""
        process, file, size = struct.unpack(_HANDLE, handle)
        if process == os.getpid():
            raise RuntimeError("cudaErrorDeviceUninitialized: this process's own memory")
        theirs = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        array, start = _map(theirs, size)
        os.close(theirs)
        self.mapped[start] = array
        return start

    def closed(self, start):
        """``ipcCloseMemHandle``; returns what was mapped."""
        return self.mapped.pop(start)


def _map(file, size):
    array = np.frombuffer(mmap.mmap(file, size), np.uint8)
    return array, array.__array_interface__["data"][0]
