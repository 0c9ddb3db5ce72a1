"""Messages from and to device memory that are staged through the host.

They start behind a gate (:mod:`collectives.execution.device_plan`): all that was queued before has
been done then.  A CUDA-aware MPI takes device memory as it is, behind the same gate; no reduction
of the MPI library ever touches it.

The messages of all plans of a transport take turns with pinned host memory.  With memory of its own
for each message, a ring all-reduce of s bytes on p ranks would pin about 4 s (p-1)/p bytes for each
plan, for as long as the plan lives.  So a message has some only while it moves: as much is pinned
as messages were ever under way at once, 2 s/p bytes of a ring.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from collectives.execution.transport import Bytes, Request, Transport
from collectives.execution.transport.cuda_memory import CudaMemory

#: Staged messages go in parts, so that one part is on the wire while the next one is copied.
PART_BYTES = 4 << 20
#: Pieces of pinned memory have this many bytes, or a power of two more.
_LEAST_BYTES = 4 << 10


class Bounce(NamedTuple):
    """A piece of pinned memory, and the event after which the device uses it no more."""

    host: Bytes
    free: Any


class Bounces:
    """The pieces that no message has.

    A message never waits for one: a rank that did could be the one that the others wait for.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self.memory = memory
        self._idle: dict[int, list[Bounce]] = {}
        self._all: list[Bounce] = []
        # CuPy's pool may give pinned memory to others while the device still copies from it.
        weakref.finalize(self, _settle, self._all).atexit = False

    def take(self, nbytes: int) -> Bounce:
        """A piece of ``nbytes`` at least, which no copy uses any more."""
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        idle = self._idle.setdefault(size, [])
        for at in range(len(idle) - 1, -1, -1):
            if idle[at].free.done:
                return idle.pop(at)
        bounce = Bounce(self.memory.pinned(size), self.memory.event())
        self._all.append(bounce)
        return bounce

    def give(self, bounce: Bounce) -> None:
        """Another message may have it once what is queued now is done."""
        bounce.free.record()
        self._idle[len(bounce.host)].append(bounce)

    @property
    def nbytes(self) -> int:
        """Pinned in all."""
        return sum(len(bounce.host) for bounce in self._all)


def _settle(bounces: list[Bounce]) -> None:
    for bounce in bounces:
        bounce.free.synchronize()


class _Staged:
    """A message by way of pinned memory, which it has from when it needs it until it is done.

    The request of the transport below is kept from run to run, and made again where the message
    gets other pinned memory than before.
    """

    def __init__(self, data: Bytes, bounces: Bounces, init: Callable[[Bytes], Request]) -> None:
        self.data = data
        self.memory = bounces.memory
        self.inner: Request | None = None
        self._bounces = bounces
        self._init = init
        self._bounce: Bounce | None = None
        self._last: Bounce | None = None

    def take(self) -> Bytes:
        """Pinned memory of the message's length, and the request for it."""
        self._bounce = bounce = self._bounces.take(self.data.nbytes)
        host = bounce.host[: self.data.nbytes]
        if bounce is not self._last:
            self.Free()
            self.inner, self._last = self._init(host), bounce
        return host

    @property
    def is_moving(self) -> bool:
        """Whether it has started and is not finished."""
        return self._bounce is not None

    def Start(self) -> None:
        assert self.inner is not None, "it was taken"
        self.inner.Start()

    def Wait(self) -> None:
        if self.is_moving and self.inner is not None:
            self.inner.Wait()
            self.finish()

    def finish(self) -> None:
        """The message is over: another one may have the pinned memory."""
        assert self._bounce is not None, "it was taken"
        self._bounces.give(self._bounce)
        self._bounce = None

    def Free(self) -> None:
        if self.inner is not None:
            self.inner.Free()
            self.inner = self._last = None


class StagedSend(_Staged):
    """Copies to pinned memory, then sends."""

    def prepare(self) -> None:
        """Queues the copy, which must be done when the message starts."""
        self.memory.download(self.take(), self.data)


class StagedReceive(_Staged):
    """Receives into pinned memory, then copies; what follows is queued behind the copy."""

    def Start(self) -> None:
        self.take()
        super().Start()

    def finish(self) -> None:
        assert self._bounce is not None, "it was taken"
        self.memory.upload(self.data, self._bounce.host[: self.data.nbytes])
        super().finish()


class StagedTransport:
    """For an MPI that cannot read device memory."""

    def __init__(self, inner: Transport, memory: CudaMemory) -> None:
        self.inner = inner
        self.bounces = Bounces(memory)
        self.rank, self.size = inner.rank, inner.size
        self.longest = min(inner.longest, PART_BYTES)

    def send_init(self, data: Bytes, peer: int, tag: int) -> StagedSend:
        return StagedSend(data, self.bounces, lambda host: self.inner.send_init(host, peer, tag))

    def recv_init(self, data: Bytes, peer: int, tag: int) -> StagedReceive:
        return StagedReceive(data, self.bounces, lambda host: self.inner.recv_init(host, peer, tag))

    def testall(self, requests: Sequence[Any]) -> bool:
        """Copies each message to the device as soon as it is here."""
        moving = [request for request in requests if request.is_moving]
        for request in moving:
            if self.inner.testall([request.inner]):
                request.finish()
        return not any(request.is_moving for request in moving)
