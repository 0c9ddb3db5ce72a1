"""The kinds of memory that arrays lie in, as plans use them; NumPy's on the host.

A GPU's memory is :mod:`collectives.execution.transport.cuda_memory`.  Work there is queued on a
stream and done later, so MPI must not read or write it before the stream has come that far; that
is the business of gates (:mod:`collectives.execution.device_plan`).
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from functools import partial
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

Items = npt.NDArray[Any]

#: Stores across the ends of cache lines take NumPy's loops twice as long; below so many bytes, a
#: second call takes longer than they do.
_LINE, _LONG = 64, 32 << 10


class Combine(Protocol):
    """A reduction of two arrays, as NumPy's functions are."""

    def __call__(self, left: Items, right: Items, /, *, out: Items) -> object:
        """Puts ``left (op) right`` into ``out``, which may be either of them."""


class Memory(Protocol):
    """Operations on the arrays of one kind of memory."""

    def empty(self, count: int, dtype: "np.dtype[Any]") -> Items:
        """A new 1-D array."""

    def zeros(self, shape: Any, dtype: npt.DTypeLike) -> Items:
        """A new array of zeros."""

    def copy(self, target: Items, source: Items) -> object:
        """Copies between arrays of one type."""

    def convert(self, target: Items, source: Items) -> object:
        """Copies between arrays that may differ in their type."""

    def address(self, items: Items) -> int:
        """Where an array begins."""

    def combine(self, function: Combine) -> Combine:
        """A reduction for arrays of this memory."""

    def reduction(
        self, combine: Combine, left: Items, right: Items, out: Items
    ) -> Callable[[], object]:
        """The call that puts ``left (op) right`` into ``out``; ``combine`` is this memory's."""

    def borrowed(self, items: Items) -> Items:
        """The array's memory by address: whoever uses it must know that it is still there."""


class Event(Protocol):
    """A place in a stream, in CuPy's words.

    Attributes:
        done: whether the stream has passed it.
    """

    done: bool

    def record(self, stream: Any = None) -> object:
        """Puts it behind all that is queued on ``stream``, by default the current one."""

    def synchronize(self) -> object:
        """The host waits for it."""


class DeviceMemory(Memory, Protocol):
    """Memory whose work is queued, on the stream that is current when something is called."""

    def event(self) -> Event:
        """A new event of this device."""

    def callers(self) -> Sequence[Any]:
        """The streams whose work comes before and after that of a call."""

    def mark(self, streams: Sequence[Any], events: Sequence[Event]) -> None:
        """Each event is behind all that its stream has queued."""

    def follow(self, events: Sequence[Event]) -> None:
        """Puts all that is queued on the own stream from here on behind these events."""

    def working(self) -> AbstractContextManager[object]:
        """In it, the own stream is the current one."""

    def synchronize(self) -> object:
        """Returns when all is done that was queued on the current stream."""

    def settle(self) -> object:
        """Returns when all is done that was queued on any stream of the device."""

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that copies to and from the device are fastest with."""

    def download(self, host: Items, device: Items) -> None:
        """Queues a copy to the host."""

    def upload(self, device: Items, host: Items) -> None:
        """Queues a copy from the host."""

    def shareable(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """New memory that other processes can map."""

    def handle(self, items: Items) -> bytes:
        """The handle by which another process maps :meth:`shareable` memory."""

    def mapped(self, handle: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
        """Another process's memory."""

    def unmap(self, items: Items) -> None:
        """Lets go of :meth:`mapped` memory."""


class HostMemory:
    """NumPy."""

    @staticmethod
    def empty(count: int, dtype: "np.dtype[Any]") -> Items:
        return np.empty(count, dtype)

    @staticmethod
    def zeros(shape: Any, dtype: npt.DTypeLike) -> Items:
        return np.zeros(shape, dtype)

    #: As it is: many copies take less time than a Python function in between would.
    copy = staticmethod(np.copyto)

    @staticmethod
    def convert(target: Items, source: Items) -> None:
        if target.dtype == source.dtype:
            np.copyto(target, source)
        else:
            _quiet().run(np.copyto, target, source, casting="unsafe")

    @staticmethod
    def address(items: Items) -> int:
        address: int = items.__array_interface__["data"][0]
        return address

    @staticmethod
    def combine(function: Combine) -> Combine:
        """Runs it in a context of its own, where no overflow raises or warns, whatever the caller's
        ``np.errstate``: MPI's operations never do, and a rank that raised alone would leave the
        others waiting."""
        if not isinstance(function, np.ufunc):
            return function
        return partial(_quiet().run, function)

    @staticmethod
    def reduction(combine: Combine, left: Items, right: Items, out: Items) -> Callable[[], object]:
        """Reduces in two parts, so that all but the first few stores begin with a cache line:
        malloc's large blocks begin 16 bytes behind one."""
        size = out.itemsize
        if out.nbytes >= _LONG and _LINE % size == 0:
            head, between = divmod(-HostMemory.address(out) % _LINE, size)
            if head and not between:
                first = partial(combine, left[:head], right[:head], out=out[:head])
                rest = partial(combine, left[head:], right[head:], out=out[head:])
                return partial(_both, first, rest)
        return partial(combine, left, right, out=out)

    @staticmethod
    def borrowed(items: Items) -> Items:
        if not items.nbytes:
            return np.empty(0, items.dtype)
        memory = (ctypes.c_byte * items.nbytes).from_address(HostMemory.address(items))
        return np.frombuffer(memory, items.dtype)  # type: ignore[call-overload]


def _both(first: Callable[[], object], rest: Callable[[], object]) -> None:
    first()
    rest()


def _quiet() -> Context:
    """A context in which arithmetic neither raises nor warns; one thread at a time can be in it."""
    quiet = Context()
    quiet.run(np.seterr, all="ignore")
    return quiet


HOST = HostMemory()


def is_queued(memory: Memory) -> TypeGuard[DeviceMemory]:
    """Whether work on it is queued, as a GPU's is."""
    return not isinstance(memory, HostMemory)


def is_on_device(array: object) -> bool:
    """Whether an array lies on a GPU.

    CUDA's array interface alone does not say so: host memory may have it, too.
    """
    if isinstance(array, np.ndarray):
        return False
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return True
    if torch is not None and isinstance(array, torch.Tensor):
        return bool(array.is_cuda)  # its array interface raises where gradients are recorded
    try:
        address = array.__cuda_array_interface__["data"][0]  # type: ignore[attr-defined]
    except AttributeError:
        return False
    return _is_device_address(address)


def gpu_of(items: Items) -> int | None:
    """The number of the GPU that NumPy's or CuPy's array lies on; ``None`` on the host."""
    if isinstance(items, np.ndarray):
        return None
    gpu: int = items.device.id
    return gpu


def _is_device_address(address: int) -> bool:
    """As CUDA's driver says; in a process that has not loaded it, there is no GPU's memory."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    kind = ctypes.c_uint(0)
    memory_type, on_device = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
    status = driver.cuPointerGetAttribute(
        ctypes.byref(kind), memory_type, ctypes.c_ulonglong(address)
    )
    return status == 0 and kind.value == on_device
