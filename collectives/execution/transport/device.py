"""Messages from and to device memory: handed to MPI as they are, or staged through the host.

In both, MPI gets to see a chunk only when everything that was queued before has been done: without
that, what is sent is what lay there earlier.
"""

from collections.abc import Sequence
from typing import Any

from collectives.execution.memory import DeviceMemory
from collectives.execution.transport import Bytes, Request, Transport

#: Staged messages go in parts, so that one part is on the wire while the next one is copied.
PART_BYTES = 4 << 20


class DirectRequest:
    """A message between a CUDA-aware MPI and device memory."""

    def __init__(self, inner: Request, memory: DeviceMemory) -> None:
        self.inner = inner
        self.memory = memory

    def Start(self) -> None:
        self.memory.synchronize()
        self.inner.Start()

    def Wait(self) -> object:
        return self.inner.Wait()

    def Free(self) -> None:
        self.inner.Free()


class DirectTransport:
    """Point-to-point on device memory: no MPI reduction ever touches it."""

    def __init__(self, inner: Transport, memory: DeviceMemory) -> None:
        self.inner = inner
        self.memory = memory
        self.rank, self.size = inner.rank, inner.size
        self.longest = inner.longest

    def send_init(self, data: Bytes, peer: int, tag: int) -> DirectRequest:
        return DirectRequest(self.inner.send_init(data, peer, tag), self.memory)

    def recv_init(self, data: Bytes, peer: int, tag: int) -> DirectRequest:
        return DirectRequest(self.inner.recv_init(data, peer, tag), self.memory)

    def testall(self, requests: Sequence[Any]) -> bool:
        return self.inner.testall([request.inner for request in requests])


class StagedSend:
    """Copies to pinned memory, then sends."""

    def __init__(self, data: Bytes, transport: "StagedTransport", peer: int, tag: int) -> None:
        self.data = data
        self.memory = transport.memory
        self.host = self.memory.pinned(data.nbytes)
        self.inner = transport.inner.send_init(self.host, peer, tag)

    def Start(self) -> None:
        self.memory.download(self.host, self.data)
        self.memory.synchronize()
        self.inner.Start()

    def Wait(self) -> object:
        return self.inner.Wait()

    def finish(self) -> None:
        """Nothing is left to do."""

    def Free(self) -> None:
        self.inner.Free()


class StagedReceive:
    """Receives into pinned memory, then copies; what follows is queued behind the copy."""

    def __init__(self, data: Bytes, transport: "StagedTransport", peer: int, tag: int) -> None:
        self.data = data
        self.memory = transport.memory
        self.host = self.memory.pinned(data.nbytes)
        self.inner = transport.inner.recv_init(self.host, peer, tag)

    def Start(self) -> None:
        self.memory.synchronize()  # the copy of the run before may still read the pinned memory
        self.inner.Start()

    def Wait(self) -> object:
        self.inner.Wait()
        self.finish()
        return None

    def finish(self) -> None:
        """The message is here: on to the device."""
        self.memory.upload(self.data, self.host)

    def Free(self) -> None:
        self.inner.Free()


class StagedTransport:
    """For an MPI that cannot read device memory."""

    def __init__(self, inner: Transport, memory: DeviceMemory) -> None:
        self.inner = inner
        self.memory = memory
        self.rank, self.size = inner.rank, inner.size
        self.longest = min(inner.longest, PART_BYTES)

    def send_init(self, data: Bytes, peer: int, tag: int) -> StagedSend:
        return StagedSend(data, self, peer, tag)

    def recv_init(self, data: Bytes, peer: int, tag: int) -> StagedReceive:
        return StagedReceive(data, self, peer, tag)

    def testall(self, requests: Sequence[Any]) -> bool:
        if not self.inner.testall([request.inner for request in requests]):
            return False
        for request in requests:
            request.finish()
        return True
