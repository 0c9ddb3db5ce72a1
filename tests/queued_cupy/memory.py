"""Memory of a device that does not exist, which other processes can map."""

import mmap
import os
import struct

import numpy as np

#: Fresh and freed memory holds this byte, which shows in results.
POISON = 0xA5
_HANDLE = "iiq48x"


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
