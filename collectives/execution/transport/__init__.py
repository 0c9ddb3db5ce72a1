"""How bytes get to a peer: what a plan needs of MPI, and what stands in for it without MPI."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
#: How many 8-byte words each rank can bring to a meeting of a node's ranks.
WORDS = 6
#: The words that each rank brought to a meeting.
Meeting = list[bytes]


class Request(Protocol):
    """A message that has been described once and can be started again and again (MPI's words)."""

    def Start(self) -> None: ...

    def Wait(self) -> object: ...

    def Free(self) -> None: ...


class Transport(Protocol):
    """Two-sided messages between the ranks of a communicator.

    Messages from one rank to another with the same tag match in the order in which they start.
    """

    rank: int
    size: int
    #: Bytes of a message; a longer one goes in parts.
    longest: int

    def send_init(self, data: Bytes, peer: int, tag: int) -> Request:
        """A send of the bytes that ``data`` holds whenever it is started."""

    def recv_init(self, data: Bytes, peer: int, tag: int) -> Request:
        """A receive into ``data``."""

    def testall(self, requests: Sequence[Any]) -> bool:
        """Whether all of ``requests`` have completed; makes progress."""
