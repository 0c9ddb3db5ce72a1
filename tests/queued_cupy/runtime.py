"""``cupy`` and ``cupy.cuda`` on a :class:`~tests.queued_cupy.machine.Machine`."""

import ctypes
import os
import threading
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType, SimpleNamespace

import numpy as np

from tests.queued_cupy import namespace
from tests.queued_cupy.counts import counts
from tests.queued_cupy.machine import Range, bounds
from tests.queued_cupy.memory import POISON, SharedMemory
from tests.queued_cupy.ndarray import MemoryPointer, ndarray
from tests.queued_cupy.raw import RawKernel
from tests.queued_cupy.signatures import FUNCTIONS, SHARED, UFUNCS


class CUDARuntimeError(RuntimeError):
    """CuPy's."""


class Thread(threading.local):
    """The current device and the stack of streams, which CUDA and CuPy keep for each thread."""

    def __init__(self):
        self.device = 0
        self.stacks = {}


class Runtime:
    """The functions of the two modules, for one machine."""

    def __init__(self, machine):
        self.machine = machine
        self.thread = Thread()
        self.shared = SharedMemory()
        self.pinned = {}
        self.Stream, self.Event, self.Device = _streams(self)

    # Kernels.

    def current(self, device=None):
        """The current stream, as CuPy's."""
        device = self.thread.device if device in (None, -1) else device
        return self.thread.stacks.setdefault(device, [self.Stream.null])[-1]

    def queue(self):
        """The current stream, as the machine's."""
        return self.current().queue()

    def compute(self, name, run, reads, writes, like):
        """One kernel on the current stream: it writes, or gives a new array."""
        ranges = [[bounds(one) for one in arrays] for arrays in (reads, writes)]
        if writes:
            return self.machine.launch(self.queue(), name, run, *ranges) and None
        with np.errstate(all="ignore"):
            like = np.empty_like(like())  # of whatever lies there, for its shape and type
        made = ndarray(like.shape, like.dtype, strides=like.strides)
        target = made._a
        copy = lambda: np.copyto(target, run())  # noqa: E731
        self.machine.launch(self.queue(), name, copy, ranges[0], [bounds(target)])
        return made

    def settle(self):
        """The host waits for the current stream."""
        self.machine.finish(self.queue().last)

    def expect_here(self, device, name):
        """``RuntimeError`` for an array that the current device does not have."""
        if device != self.thread.device:
            raise RuntimeError(
                f"{name}: an array on device {device} is used on device {self.thread.device}"
            )

    def read(self, array):
        """A copy of the host's, for which it waits."""
        found = np.empty(array.shape, array.dtype)
        copy = lambda: np.copyto(found, array)  # noqa: E731
        self.machine.finish(self.machine.launch(self.queue(), "get", copy, [bounds(array)], []))
        return found

    def leave(self, host, array):
        """A copy to pinned memory of the host, for which nobody waits."""
        if host.size:
            self._move(self.queue(), "get", bounds(array), bounds(host))

    def write(self, target, given, stream):
        """On a stream, from pinned memory: read when the copy is done, and kept by nobody."""
        if stream is None:
            values = given.copy()
            copy = lambda: np.copyto(target, values)  # noqa: E731
            self.machine.launch(self.queue(), "set", copy, [], [bounds(target)])
        else:
            self._move(stream.queue(), "set", bounds(given), bounds(target))

    def _move(self, queue, name, source, target):
        copy = partial(ctypes.memmove, target.start, source.start, source.stop - source.start)
        self.machine.launch(queue, name, copy, [source], [target])

    # Memory.

    def alloc(self, nbytes):
        """From the pool of the current stream."""
        block = _Block(self, nbytes)
        return MemoryPointer(block.ptr, block)

    def UnownedMemory(self, ptr, size, owner, device_id=-1):
        return SimpleNamespace(ptr=ptr, size=size, device_id=device_id, owner=owner)

    def Memory(self, size):
        return _Shareable(self, size)

    def alloc_pinned_memory(self, size):
        length = 1 << (size - 1).bit_length()  # as CuPy's pool has them
        free = self.pinned.setdefault(length, [])
        block = free.pop() if free else np.full(length, POISON, np.uint8)
        return _pinned(length)(self, block)

    def memcpyAsync(self, dst, src, size, kind, stream):
        source, target = Range(src, src + size), Range(dst, dst + size)
        self._move(self.queue_at(stream), "memcpy", source, target)

    def queue_at(self, ptr):
        """The machine's stream of this pointer, which must be one of the current device."""
        queue = self.machine.streams[ptr] if ptr else self.machine.null[self.thread.device]
        if queue.device != self.thread.device:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: a stream of another device")
        return queue

    def setDevice(self, number):
        if not 0 <= number < self.machine.device_count:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self.thread.device = number

    # Between processes.

    def ipcOpenMemHandle(self, handle, flags=1):
        address = self.shared.opened(handle)
        self.machine.register(address, self.shared.mapped[address].size, self.thread.device)
        return address

    def ipcCloseMemHandle(self, address):
        self.machine.unregister(address)
        self.machine._kept.append(self.shared.closed(address))


class _Block:
    """Memory of the pool."""

    def __init__(self, runtime, nbytes):
        self.machine, self.stream = runtime.machine, runtime.queue()
        self.device_id = runtime.thread.device
        self.ptr, self.size = self.machine.allocate(nbytes, self.stream)

    def __del__(self):
        self.machine.free(self.ptr, self.size, self.stream)


class _Shareable:
    """An allocation, which other processes can map by the descriptor that the handle names."""

    def __init__(self, runtime, size):
        self.runtime, self.size = runtime, size
        self.device_id = runtime.thread.device
        self.array, self.ptr = runtime.shared.allocate(size)
        self.array.fill(POISON)
        runtime.machine.register(self.ptr, size, self.device_id)

    def __del__(self):
        """``cudaFree`` waits for the device."""
        machine = self.runtime.machine
        machine._kept.append(self.array)  # queued work with a fault in it may still use it
        self.runtime.shared.free(self.ptr)
        machine.unmap(self.ptr, self.device_id)


@cache
def _pinned(length):
    """The class of pinned memory of so many bytes, for the buffer protocol."""

    class Pinned(ctypes.c_uint8 * length):
        """Another's as soon as it is dropped, whatever a stream still copies."""

        def __new__(cls, runtime, block):
            return cls.from_address(block.ctypes.data)

        def __init__(self, runtime, block):
            self.runtime, self.block = runtime, block

        def __del__(self):
            self.block.fill(POISON)
            self.runtime.pinned[length].append(self.block)

    return Pinned


def _streams(runtime):
    """The classes of streams, events and devices."""
    machine = runtime.machine

    class Stream:
        null = None

        def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
            self.device_id = -1 if null else runtime.thread.device
            self._queue = None if null else machine.stream(self.device_id, not non_blocking)
            self.ptr = 0 if null else self._queue.ptr

        @classmethod
        def from_external(cls, obj):
            version, ptr = obj.__cuda_stream__()
            assert version == 0
            if ptr == 0:
                return cls.null
            made = object.__new__(cls)
            made._queue, made.ptr = machine.streams[ptr], ptr
            made.device_id = made._queue.device
            return made

        def queue(self):
            if self._queue is None:
                return machine.null[runtime.thread.device]
            return self._queue

        def __eq__(self, other):
            return isinstance(other, Stream) and self.ptr == other.ptr

        __hash__ = object.__hash__

        def __enter__(self):
            device = runtime.thread.device
            if self.device_id not in (-1, device):
                raise RuntimeError(
                    f"The device that the stream is created on ({self.device_id}) does not match "
                    f"with the current device ({device})"
                )
            runtime.current(device)
            runtime.thread.stacks[device].append(self)
            self._pushed = device
            return self

        def __exit__(self, *exception):
            runtime.thread.stacks[runtime.thread.device].pop()

        def synchronize(self):
            counts.sync("stream.synchronize()")
            machine.finish(self.queue().last)

        def wait_event(self, event):
            machine.wait(self.queue(), event.op)

    class Event:
        def __init__(self, block=False, disable_timing=False, interprocess=False):
            self.device, self.op = runtime.thread.device, None

        def record(self, stream=None):
            queue = (runtime.current() if stream is None else stream).queue()
            if queue.device != self.device:
                raise CUDARuntimeError("cudaErrorInvalidResourceHandle: an event of another device")
            self.op = machine.mark(queue)

        @property
        def done(self):
            return machine.is_done(self.op)

        def synchronize(self):
            counts.sync("event.synchronize()")
            machine.finish(self.op)

    class Device:
        def __init__(self, device=None):
            self.id = runtime.thread.device if device is None else device
            self._before = []

        @property
        def pci_bus_id(self):
            return f"{os.getpid():04x}:{self.id:02x}:00.0"

        def __eq__(self, other):
            return self.id == other.id

        __hash__ = object.__hash__

        def use(self):
            runtime.setDevice(self.id)

        def synchronize(self):
            counts.sync("device.synchronize()")
            machine.settle(self.id)

        def __enter__(self):
            self._before.append(runtime.thread.device)
            runtime.setDevice(self.id)
            return self

        def __exit__(self, *exception):
            runtime.setDevice(self._before.pop())

    Stream.null = Stream(null=True)
    return Stream, Event, Device


def modules(runtime, nccl):
    """The modules by name; like CuPy's, ``cupy.cuda`` has no ``nccl`` before it is imported."""
    cupy, cupyx, cuda = (ModuleType(name) for name in ("cupy", "cupyx", "cupy.cuda"))
    cupy.__version__, cupy.ndarray = "14.0.0", ndarray
    for name in FUNCTIONS:
        setattr(cupy, name, vars(namespace).get(name) or namespace.function(name))
    for name in UFUNCS.split():
        setattr(cupy, name, namespace.Ufunc(name))
    cupy.abs = cupy.absolute
    for name in SHARED.split():
        setattr(cupy, name, getattr(np, name))
    cupy.RawKernel = RawKernel
    cupy.get_default_memory_pool = lambda: runtime.machine
    cupyx.allow_synchronize = allow_synchronize
    cupy.__path__ = cuda.__path__ = []
    cupy.cuda, cupy.asarray = cuda, partial(_asarray, runtime)
    cupy.from_dlpack = partial(_from_dlpack, runtime)
    cuda.MemoryPointer = lambda mem, offset: MemoryPointer(mem.ptr + offset, mem)
    for name in ("Stream", "Event", "Device", "UnownedMemory", "Memory"):
        setattr(cuda, name, getattr(runtime, name))
    cuda.alloc_pinned_memory = runtime.alloc_pinned_memory
    cuda.get_current_stream = lambda device_id=-1: runtime.current(device_id)
    cuda.get_allocator = lambda: runtime.alloc
    cuda.runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDevice=lambda: runtime.thread.device,
        getDeviceCount=lambda: runtime.machine.device_count,
        getDeviceProperties=lambda number: {
            "name": b"no GPU at all",
            "uuid": f"{os.getpid()} {number}".encode(),
        },
        memcpyAsync=runtime.memcpyAsync,
        memcpyDefault=4,
        setDevice=runtime.setDevice,
        ipcGetMemHandle=runtime.shared.handle_of,
        ipcOpenMemHandle=runtime.ipcOpenMemHandle,
        ipcCloseMemHandle=runtime.ipcCloseMemHandle,
    )
    return {"cupy": cupy, "cupyx": cupyx, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


@contextmanager
def allow_synchronize(allow):
    """In it, the host may wait, or may not: then it is an error."""
    before, counts.allowed = counts.allowed, allow
    try:
        yield
    finally:
        counts.allowed = before


def _asarray(runtime, a, dtype=None, order=None):
    if not isinstance(a, ndarray) and hasattr(a, "__cuda_array_interface__"):
        told = a.__cuda_array_interface__
        return _unowned(runtime, a, told["data"][0], told["shape"], told["typestr"])
    return namespace.asarray(a, dtype, order)


def _unowned(runtime, owner, start, shape, dtype):
    memory = runtime.UnownedMemory(start, 0, owner, runtime.thread.device)
    return ndarray(shape, dtype, MemoryPointer(start, memory))


def _from_dlpack(runtime, items):
    """The current stream waits for the producer's, as the protocol has it; torch's tensors on the
    CPU stand for those on a GPU where work is prompt."""
    kind, device = items.__dlpack_device__()
    if runtime.machine.prompt and kind == 1:
        from mpitrain.adapters.torch.arrays import as_array

        return ndarray.of(as_array(items))
    if kind not in (2, 13):
        raise BufferError("CuPy takes memory of CUDA")
    if device != runtime.thread.device:
        raise BufferError("an array of another device than the current one")
    array = items.__dlpack__(stream=runtime.current().ptr or 1)
    return _unowned(runtime, items, bounds(array).start, array.shape, array.dtype)
