"""Arrays on a GPU, by CuPy, and a stream there for the plans of a communicator."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.errors import INSTALL_CUPY, InvalidBuffer
from collectives.execution.memory import Combine, Items

#: ``cudaMalloc`` cuts smaller allocations out of blocks of 2 MiB, and a handle is of a whole block.
_SHAREABLE_BYTES = 2 << 20
#: CUDA takes the highest priority that the GPU has for any that is higher (a lower number).
_FIRST = -100


class CudaMemory:
    """CuPy, on the stream that is current when something is called.

    Args:
        gpu: its number in this process; by default that of the current device.
    """

    def __init__(self, gpu: int | None = None) -> None:
        try:
            import cupy
        except ImportError as error:
            raise InvalidBuffer(f"memory on a GPU needs CuPy ({error}): {INSTALL_CUPY}") from None
        self.cupy = cupy
        self.gpu: int = cupy.cuda.Device().id if gpu is None else gpu

    @cached_property
    def stream(self) -> Any:
        """A stream of our own: its work waits for another stream only behind an event."""
        with self.cupy.cuda.Device(self.gpu):
            return self.cupy.cuda.Stream(non_blocking=True, priority=_FIRST)

    @contextmanager
    def working(self) -> Iterator[None]:
        """In it, the own stream is the current one."""
        with self.cupy.cuda.Device(self.gpu), self.stream:
            yield

    def event(self) -> Any:
        """A new event of this device."""
        with self.cupy.cuda.Device(self.gpu):
            return self.cupy.cuda.Event(disable_timing=True)

    def callers(self) -> Sequence[Any]:
        """The streams whose work comes before and after that of a call."""
        cuda = self.cupy.cuda
        streams = [cuda.get_current_stream(self.gpu)]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            foreign = _Foreign(torch.cuda.current_stream(self.gpu).cuda_stream)
            with cuda.Device(self.gpu):
                streams.append(cuda.Stream.from_external(foreign))
        return streams

    def mark(self, streams: Sequence[Any], events: Sequence[Any]) -> None:
        """Puts each event behind all that its stream has queued."""
        with self.cupy.cuda.Device(self.gpu):
            for stream, event in zip(streams, events, strict=True):
                event.record(stream)

    def follow(self, events: Sequence[Any]) -> None:
        """Puts all that is queued on the own stream from here on behind these events."""
        with self.cupy.cuda.Device(self.gpu):
            for event in events:
                self.stream.wait_event(event)

    def wait_for_callers(self) -> None:
        """The host waits for all that the caller's streams have queued."""
        for stream in self.callers():
            stream.synchronize()

    @property
    def allocates_asynchronously(self) -> bool:
        """Whether CuPy's arrays come from CUDA's own pool, and not from CuPy's."""
        allocator = self.cupy.cuda.get_allocator()
        pool = type(getattr(allocator, "__self__", None)).__name__
        return "async" in f"{pool} {getattr(allocator, '__name__', '')}".lower()

    def empty(self, count: int, dtype: "np.dtype[Any]") -> Items:
        return self.cupy.empty(count, dtype)

    def zeros(self, shape: Any, dtype: npt.DTypeLike) -> Items:
        with self.cupy.cuda.Device(self.gpu):
            return self.cupy.zeros(shape, dtype)

    def copy(self, target: Items, source: Items) -> None:
        self.cupy.copyto(target, source)

    def convert(self, target: Items, source: Items) -> None:
        self.cupy.copyto(target, source, casting="unsafe")

    def address(self, items: Items) -> int:
        return items.data.ptr  # type: ignore[attr-defined]

    def combine(self, function: Combine) -> Combine:
        """CuPy's function of the same name, one kernel on the device."""
        name = getattr(function, "__name__", "")
        if not isinstance(function, np.ufunc) or not hasattr(self.cupy, name):
            raise InvalidBuffer(
                "this operation has no kernel for device memory; copy the arrays to the host "
                "(array.get()), or use a built-in operation"
            )
        return getattr(self.cupy, name)

    def reduction(
        self, combine: Combine, left: Items, right: Items, out: Items
    ) -> Callable[[], object]:
        return partial(combine, left, right, out=out)

    def borrowed(self, items: Items) -> Items:
        gpu: int = items.device.id  # type: ignore[attr-defined]
        return self._at(self.address(items), items.size, items.dtype, gpu)

    def synchronize(self) -> None:
        """Returns when all is done that was queued on the current stream."""
        self.cupy.cuda.get_current_stream().synchronize()

    def settle(self) -> None:
        """Returns when all is done that was queued on any stream of the device."""
        self.cupy.cuda.Device(self.gpu).synchronize()

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that copies to and from the device are fastest with."""
        memory = self.cupy.cuda.alloc_pinned_memory(max(1, nbytes))
        return np.frombuffer(memory, np.uint8, nbytes)

    def download(self, host: Items, device: Items) -> None:
        """Queues a copy to the host."""
        self._queue(host.ctypes.data, self.address(device), device.nbytes)

    def upload(self, device: Items, host: Items) -> None:
        """Queues a copy from the host."""
        self._queue(self.address(device), host.ctypes.data, device.nbytes)

    def shareable(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """New memory that other processes can map."""
        # Not from CuPy's pool: a handle is of a whole allocation.
        memory = self.cupy.cuda.Memory(-(-nbytes // _SHAREABLE_BYTES) * _SHAREABLE_BYTES)
        pointer = self.cupy.cuda.MemoryPointer(memory, 0)
        return self.cupy.ndarray(nbytes, np.uint8, pointer)

    def handle(self, items: Items) -> bytes:
        """The handle by which another process maps :meth:`shareable` memory."""
        handle: bytes = self.cupy.cuda.runtime.ipcGetMemHandle(self.address(items))
        return handle

    def mapped(self, handle: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
        """Another process's memory."""
        address = self.cupy.cuda.runtime.ipcOpenMemHandle(handle)
        # Whichever GPU it is on, this one can use it, and CuPy need not look further.
        return self._at(address, nbytes, np.dtype(np.uint8), self.gpu)

    def unmap(self, items: Items) -> None:
        """Lets go of :meth:`mapped` memory."""
        self.cupy.cuda.runtime.ipcCloseMemHandle(self.address(items))

    def _at(self, address: int, count: int, dtype: "np.dtype[Any]", gpu: int) -> Items:
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(address, max(1, count * dtype.itemsize), None, gpu)
        return self.cupy.ndarray(count, dtype, cuda.MemoryPointer(memory, 0))

    def _queue(self, target: int, source: int, nbytes: int) -> None:
        runtime = self.cupy.cuda.runtime
        stream = self.cupy.cuda.get_current_stream()
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.ptr)


class _Foreign:
    """A stream of another library's, in the words of CUDA's protocol for that."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address
