"""``cupy.cuda`` with one device, on which everything is done at once."""

import ctypes
from functools import partial
from types import SimpleNamespace

from tests.strict_cupy.counts import counts
from tests.strict_cupy.memory import SharedMemory
from tests.strict_cupy.ndarray import Device, MemoryPointer


class Stream:
    """The only one."""

    ptr = 0
    done = True

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        pass

    def synchronize(self):
        counts.sync("stream.synchronize()")

    def use(self):
        return self

    def wait_event(self, event):
        """Everything is done."""

    def record(self, event=None):
        return event or Event()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


class Event:
    """Done when it has been asked so often as :attr:`Counts.polls` says."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._polls, self._leaving = 0, []

    def record(self, stream=None):
        self._polls = counts.polls
        self._leaving, counts.leaving = counts.leaving, []

    @property
    def done(self):
        self._polls -= 1
        if self._polls < 0:
            self._arrive()
        return self._polls < 0

    def synchronize(self):
        counts.sync("event.synchronize()")
        self._polls = 0
        self._arrive()

    def _arrive(self):
        while self._leaving:
            out, values = self._leaving.pop(0)
            out[...] = values


class _Device(Device):
    def __init__(self, device=0):
        super().__init__(device)
        self.pci_bus_id = "0000:00:00.0"
        self.compute_capability = "90"

    def use(self):
        """It is in use."""

    def synchronize(self):
        counts.sync("device.synchronize()")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


class _Memory:
    """An allocation."""

    def __init__(self, shared, size):
        self.shared = shared
        self.array, self.ptr = shared.allocate(size)

    def __del__(self):
        self.shared.free(self.ptr)


def make():
    """A fresh ``cupy.cuda``."""
    shared = SharedMemory()
    return SimpleNamespace(
        Device=_Device,
        Event=Event,
        Stream=Stream,
        Memory=partial(_Memory, shared),
        MemoryPointer=lambda mem, offset: MemoryPointer(mem.ptr + offset, mem),
        UnownedMemory=lambda ptr, size, owner, device_id=-1: SimpleNamespace(ptr=ptr),
        alloc_pinned_memory=bytearray,
        get_allocator=lambda: None,
        get_current_stream=Stream,
        get_elapsed_time=lambda start_event, end_event: 0.0,
        runtime=SimpleNamespace(
            CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
            getDevice=lambda: 0,
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda number: {"name": b"no GPU at all", "uuid": bytes(16)},
            ipcCloseMemHandle=shared.closed,
            ipcGetMemHandle=shared.handle_of,
            ipcOpenMemHandle=shared.opened,
            memcpyAsync=lambda dst, src, size, kind, stream: ctypes.memmove(dst, src, size),
            memcpyDefault=4,
        ),
    )
