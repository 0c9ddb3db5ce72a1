"""All ranks in one process: for tests and teaching, with no MPI.

A message moves when both of its ends have started, as under MPI's rendezvous protocol, so what
hangs here can hang there.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from collectives.execution.transport import Bytes

Mailbox = defaultdict[tuple[int, int, int], deque["LocalRequest"]]


class LocalRequest:
    """One end of a message; ``mine`` and ``theirs`` are the queues of waiting ends."""

    def __init__(
        self, data: Bytes, sends: bool, mine: deque["LocalRequest"], theirs: deque["LocalRequest"]
    ) -> None:
        self.data = data
        self.sends = sends
        self.mine = mine
        self.theirs = theirs
        self.done = True

    def Start(self) -> None:
        if not self.theirs:
            self.done = False
            self.mine.append(self)
            return
        other = self.theirs.popleft()
        source, target = (self, other) if self.sends else (other, self)
        if source.data.nbytes != target.data.nbytes:
            raise ValueError(
                f"a message of {source.data.nbytes} bytes met a receive of {target.data.nbytes}"
            )
        target.data[:] = source.data
        other.done = True

    def Wait(self) -> None:
        if not self.done:
            raise RuntimeError("this message waits for a rank of the same process: use Test")

    def Free(self) -> None:
        self.done = True


class LocalTransport:
    """The end of ``rank``; all ranks share ``posted``, one pair of queues for each route."""

    longest = 1 << 62

    def __init__(self, rank: int, size: int, posted: tuple[Mailbox, Mailbox]) -> None:
        self.rank = rank
        self.size = size
        self.sends, self.recvs = posted

    def send_init(self, data: Bytes, peer: int, tag: int) -> LocalRequest:
        route = (self.rank, peer, tag)
        return LocalRequest(data, True, self.sends[route], self.recvs[route])

    def recv_init(self, data: Bytes, peer: int, tag: int) -> LocalRequest:
        route = (peer, self.rank, tag)
        return LocalRequest(data, False, self.recvs[route], self.sends[route])

    @staticmethod
    def testall(requests: Sequence[Any]) -> bool:
        return all(request.done for request in requests)


def connect(size: int) -> list[LocalTransport]:
    """Transports of ``size`` ranks that reach one another."""
    posted: tuple[Mailbox, Mailbox] = (defaultdict(deque), defaultdict(deque))
    return [LocalTransport(rank, size, posted) for rank in range(size)]
