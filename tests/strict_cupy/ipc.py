"""Allocations that other processes can map, as CUDA IPC maps them."""

import mmap
import os
import struct

import numpy as np

#: By address: what this process has allocated, and what it has mapped of others'.
allocated, mapped = {}, {}
_HANDLE = "iiq48x"


class Memory:
    """An allocation; its handle names a descriptor of this process."""

    def __init__(self, size):
        self.file = os.memfd_create("device memory")
        os.truncate(self.file, size)
        self.array, self.ptr = _map(self.file, size)
        allocated[self.ptr] = self.file, size

    def __del__(self):
        os.close(allocated.pop(self.ptr)[0])


def _map(file, size):
    array = np.frombuffer(mmap.mmap(file, size), np.uint8)
    return array, array.__array_interface__["data"][0]


def handle_of(address):
    """``ipcGetMemHandle``."""
    if address not in allocated:
        raise RuntimeError("cudaErrorInvalidValue: not where an allocation begins")
    return struct.pack(_HANDLE, os.getpid(), *allocated[address])


def opened(handle):
    """``ipcOpenMemHandle``."""
    process, file, size = struct.unpack(_HANDLE, handle)
    if process == os.getpid():
        raise RuntimeError("cudaErrorDeviceUninitialized: this process's own memory")
    theirs = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    array, address = _map(theirs, size)
    os.close(theirs)
    mapped[address] = array
    return address


def closed(address):
    """``ipcCloseMemHandle``."""
    mapped.pop(address)
