"""Messages that carry a checksum: what arrives changed is refused, and named.

Networks and MPI libraries check their packets, but a broken cable adapter, a driver's bug or a
cosmic ray in a buffer lies outside of what they check; and a sum with a wrong operand is wrong on
all ranks alike, which no comparison of replicas finds.
"""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

from collectives.errors import CorruptMessage
from collectives.execution.transport import Bytes
from collectives.execution.transport.mpi import MPITransport


class Sealed:
    """Bytes and their CRC-32 as one message: an MPI type that joins the two places in memory.

    So the checksum costs no message of its own.

    Attributes:
        message: the buffer specification for mpi4py's calls.
    """

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self._sum = np.zeros(1, np.uint32)
        self._type = MPI.BYTE.Create_hindexed(
            [data.nbytes, self._sum.nbytes], [data.ctypes.data, self._sum.ctypes.data]
        ).Commit()
        self.message = [MPI.BOTTOM, 1, self._type]

    def seal(self) -> None:
        """Before it is sent."""
        self._sum[0] = crc32(self.data.data)

    def check(self, comm: MPI.Intracomm, peer: int) -> None:
        """After it has arrived from a rank of ``comm``.

        Raises:
            CorruptMessage: the bytes are not those that were sealed; ranks are those of the job.
        """
        found = crc32(self.data.data)
        if found != self._sum[0]:
            rank, peer = comm.group.Translate_ranks([comm.rank, peer], MPI.COMM_WORLD.group)
            raise CorruptMessage(
                f"rank {rank}: a message of {self.data.nbytes} bytes from rank {peer} arrived "
                f"changed: checksum {found:08x} instead of {self._sum[0]:08x}; look at memory and "
                f"network adapters of the nodes of ranks {rank} and {peer}"
            )

    def is_there(self) -> bool:
        return True

    def free(self) -> None:
        """Releases the type."""
        self._type.Free()


class SealedSend:
    """A persistent send, sealed whenever it starts."""

    def __init__(self, channel: MPI.Intracomm, data: Bytes, peer: int, tag: int) -> None:
        self.sealed = Sealed(data)
        self.request = channel.Send_init(self.sealed.message, peer, tag)

    def Start(self) -> None:
        self.sealed.seal()
        self.request.Start()

    def Wait(self) -> None:
        self.request.Wait()

    def Free(self) -> None:
        self.request.Free()
        self.sealed.free()


class SealedReceive:
    """A persistent receive, checked whenever it ends."""

    def __init__(self, channel: MPI.Intracomm, data: Bytes, peer: int, tag: int) -> None:
        self.sealed = Sealed(data)
        self.request = channel.Recv_init(self.sealed.message, peer, tag)
        self._route = channel, peer
        self._checked = True

    def Start(self) -> None:
        self._checked = False
        self.request.Start()

    def Wait(self) -> None:
        self.request.Wait()
        self.check()

    def check(self) -> None:
        """Once: afterwards the bytes are the caller's, who may change them."""
        if not self._checked:
            self._checked = True
            self.sealed.check(*self._route)

    def Free(self) -> None:
        self.request.Free()
        self.sealed.free()


class CheckedTransport(MPITransport):
    """As :class:`MPITransport`; both ends pay a pass over each message, about 1 s for 1-3 GB."""

    has_checksums = True

    @classmethod
    def envelope(cls, data: Bytes) -> Sealed:
        return Sealed(data)

    def send_init(self, data: Bytes, peer: int, tag: int) -> SealedSend:
        return SealedSend(self.channel, data, peer, tag)

    def recv_init(self, data: Bytes, peer: int, tag: int) -> SealedReceive:
        return SealedReceive(self.channel, data, peer, tag)

    @staticmethod
    def testall(requests: Sequence[Any]) -> bool:
        if not MPI.Request.Testall([request.request for request in requests]):
            return False
        for request in requests:
            if isinstance(request, SealedReceive):
                request.check()
        return True
