"""Messages that carry a checksum: what arrives changed is refused, and named.

Networks and MPI libraries check their packets, but a broken cable adapter, a driver's bug or a
cosmic ray in a buffer lies outside of what they check; and a sum with a wrong operand is wrong on
all ranks alike, which no comparison of replicas finds.
"""

from zlib import crc32

import numpy as np
from mpi4py import MPI

from collectives.errors import CorruptMessage
from collectives.execution.transport import Bytes
from collectives.execution.transport.mpi import Envelope, EnvelopedTransport


class Sealed(Envelope):
    """Bytes and their CRC-32."""

    def __init__(self, data: Bytes) -> None:
        super().__init__(data, np.uint32)

    def seal(self) -> None:
        self.number[0] = crc32(self.data.data)

    def check(self, comm: MPI.Intracomm, source: int | None) -> None:
        if source is None:
            return
        found = crc32(self.data.data)
        if found != self.number[0]:
            rank, peer = comm.group.Translate_ranks([comm.rank, source], MPI.COMM_WORLD.group)
            raise CorruptMessage(
                f"rank {rank}: a message of {self.data.nbytes} bytes from rank {peer} arrived "
                f"changed: checksum {found:08x} instead of {self.number[0]:08x}; look at memory "
                f"and network adapters of the nodes of ranks {rank} and {peer}"
            )


class CheckedTransport(EnvelopedTransport):
    """As :class:`MPITransport`; both ends pay a pass over each message, about 1 s for 1-3 GB."""

    has_checksums = True

    @classmethod
    def envelope(cls, data: Bytes) -> Sealed:
        return Sealed(data)
