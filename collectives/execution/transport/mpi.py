"""Two-sided MPI: persistent requests on a communicator of our own."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from collectives.execution.transport import Bytes, Envelope, Request


def largest_tag() -> int:
    """The largest tag of this MPI, which no plan uses."""
    return MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767


class MPITransport:
    """Messages over ``channel``, a communicator that nothing else sends on.

    Requests are persistent, as that reads the arguments once: three quarters of the price of a
    ``Sendrecv`` of 8 bytes.  All messages are bytes, so types that the MPI library lacks (float16,
    bfloat16) travel as well.
    """

    #: Many MPI libraries count in 32 bits.
    longest = 1 << 30
    #: Whether messages carry checksums: collectives then send nothing in any other way.
    has_checksums = False
    #: Whether messages arrive as over a slower link: again, nothing is sent in any other way.
    delays = False

    def __init__(self, channel: MPI.Intracomm) -> None:
        self.channel = channel
        self.rank = channel.rank
        self.size = channel.size

    @classmethod
    def envelope(cls, data: Bytes) -> Envelope | None:
        """The envelope of a message of these bytes; ``None`` if it needs none."""
        return None

    def send_init(self, data: Bytes, peer: int, tag: int) -> Request:
        return self.channel.Send_init([data, data.nbytes, MPI.BYTE], peer, tag)

    def recv_init(self, data: Bytes, peer: int, tag: int) -> Request:
        return self.channel.Recv_init([data, data.nbytes, MPI.BYTE], peer, tag)

    @staticmethod
    def testall(requests: Sequence[Any]) -> bool:
        return MPI.Request.Testall(requests)
