"""A GPU, by CuPy: arrays stay there, and the host only queues work."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial as given
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array, Scalar
from mpitrain.device.host import Device, Later
from mpitrain.fields import Records, fields, joined, partial, unused


class _Copy(Later):
    """Copy into pinned memory, with the event that follows it."""

    def __init__(self, device: "Cuda", host: Array, event: Any) -> None:
        super().__init__(host)
        self._device, self._event = device, event

    @property
    def done(self) -> bool:
        return bool(self._event.done)

    def get(self) -> Array:
        if not self.done:
            # A thread begins on GPU 0, whichever is the rank's.
            with self._device.gpu:
                self._event.synchronize()
        return self._host


class _Copies(Later):
    """Copies of the fields of records."""

    def __init__(self, parts: Mapping[str, Later]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts.values())

    def get(self) -> Array:
        return joined({name: part.get() for name, part in self._parts.items()})


class Cuda(Device):
    """One GPU, which is current in the thread that made this; work goes to CuPy's current stream.

    Attributes:
        name: as ``cuda:0 NVIDIA H100``.
        gpu: CuPy's object for it.
    """

    def __init__(self, number: int) -> None:
        """``number``: index among the GPUs that this rank sees."""
        import cupy

        self.xp = cupy
        self.gpu = cupy.cuda.Device(number)
        self.gpu.use()
        label = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
        self.name = f"cuda:{number} {label}"
        #: Copies to the GPU have a stream of their own, and go beside the kernels.
        self._copies = cupy.cuda.Stream(non_blocking=True)
        #: Events and buffers of copies under way, oldest first.
        self._copying: deque[tuple[Any, Array, Array]] = deque()

    def put(self, host: Array) -> Array:
        """Copies to pinned memory at once, and from there in the background."""
        return self.ahead(host)()

    def ahead(self, host: Array) -> Callable[[], Array]:
        if host.dtype.names:
            coming = {name: self.ahead(part) for name, part in fields(host).items()}
            return lambda: partial(joined({n: one() for n, one in coming.items()}), unused(host))
        while self._copying and self._copying[0][0].done:
            self._copying.popleft()
        array = self.xp.empty(host.shape, host.dtype)
        if not host.size:
            return lambda: array
        pinned = self._pinned(host)
        pinned[...] = host
        # Work queued before may still use this memory of the pool.
        self._copies.wait_event(self._mark())
        array.set(pinned, self._copies)
        copied = self._mark(self._copies)
        # Neither is another's before that, also if nobody ever asks for the array.
        self._copying.append((copied, pinned, array))

        def here() -> Array:
            self.xp.cuda.get_current_stream().wait_event(copied)
            return array

        return here

    def get(self, array: Array) -> Array:
        if isinstance(array, np.ndarray):
            return array
        if isinstance(array, Records):
            return joined({name: self.get(part) for name, part in array.parts.items()})
        return self.xp.asnumpy(array)

    def number(self, scalar: Scalar) -> Scalar:
        return scalar.astype(np.float64) if isinstance(scalar, self.xp.ndarray) else float(scalar)

    def read(self, scalars: Sequence[Scalar]) -> list[float]:
        here = [one for one in scalars if isinstance(one, self.xp.ndarray)]
        if not here:
            return [float(one) for one in scalars]
        together = self.xp.concatenate([one.reshape(1).astype(np.float64) for one in here])
        found = iter(self.xp.asnumpy(together).tolist())
        return [next(found) if isinstance(one, self.xp.ndarray) else float(one) for one in scalars]

    def bring(self, array: Array) -> Later:
        return self.snapshot(array)

    def snapshot(self, array: Array) -> Later:
        if isinstance(array, Records):
            return _Copies({name: self.snapshot(part) for name, part in array.parts.items()})
        host = self._pinned(array)
        self.xp.ascontiguousarray(array).get(out=host, blocking=False)
        return _Copy(self, host, self._mark())

    def allocate(self, comm: Communicator) -> Callable[..., Array]:
        return given(comm.empty, memory="cupy")

    def add_up(self, comm: Communicator, array: Array) -> None:
        if comm.size > 1:
            comm.Allreduce(MPI.IN_PLACE, array)

    def memory(self) -> float:
        return float(self.xp.get_default_memory_pool().total_bytes())

    def clock(self) -> float:
        self.xp.cuda.get_current_stream().synchronize()
        return perf_counter()

    def _pinned(self, like: Array) -> Array:
        memory = self.xp.cuda.alloc_pinned_memory(max(1, like.nbytes))
        found: Array = np.frombuffer(memory, like.dtype, like.size).reshape(like.shape)
        return found

    def _mark(self, stream: Any = None) -> Any:
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event
