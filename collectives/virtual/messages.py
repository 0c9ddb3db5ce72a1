"""Messages between virtual ranks, as an MPI over TCP moves them without a progress thread.

A small message leaves with its post, and waits at its receiver.  A large one goes by rendezvous:
its header meets the receive, the receiver answers, and the bytes follow.  Either rank reads within
its calls only, but bytes move on while ranks compute as far as the sender's socket holds them.

Headers and answers go behind the bytes that are on their way in their direction.  Ranks that
exchange large messages begin together where each has answered before its own bytes leave; where
one is ahead, its bytes hold its answer up, and the messages take turns.

With asynchronous progress, all messages begin when both of their ends are posted, so that what
hangs in any MPI hangs here.
"""

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from mpi4py import MPI as library

from collectives.virtual.links import THIRD
from collectives.virtual.rank import Operation, here

if TYPE_CHECKING:
    from collectives.virtual.context import Context

ANY_SOURCE, ANY_TAG = library.ANY_SOURCE, library.ANY_TAG
#: Bytes that a socket takes at once and sends while its rank computes: the most of Linux.
BUFFER = 4 << 20


class MessageEnd(Operation):
    """An end of a message.

    Attributes:
        rank: the rank that has posted it.
        source, target, tag: numbers in the communicator; a receive's may be any.
        data: bytes to send, or memory to receive into; ``None``: what comes becomes ``result``.
        nbytes: length of the message.
        is_eager: whether it is sent without regard to its receive.
        is_cancelled: whether it has ended without a message.
    """

    def __init__(
        self, context: "Context", sends: bool, data: Any, source: int, target: int, tag: int
    ) -> None:
        peer, word = (target, "sends to") if sends else (source, "receives from")
        if not 0 <= peer < len(context.members):
            if peer != library.PROC_NULL and (sends or peer != ANY_SOURCE):
                raise library.Exception(library.ERR_RANK)
            known = []
        else:
            known = [context.members[peer]]
        if tag < 0 and (sends or tag != ANY_TAG):
            raise library.Exception(library.ERR_TAG)
        whom = f"rank {known[0]}" if known else "any rank"
        which = "any tag" if tag == ANY_TAG else f"tag {tag}"
        super().__init__(f"{word} {whom} ({which})", lambda: known)
        self.rank, self.context, self.sends, self.data = here(), context, sends, data
        self.source, self.target, self.tag = source, target, tag
        self.nbytes = 0 if data is None else len(data)
        self.is_cancelled = False
        cluster = self.rank.cluster
        is_short = self.nbytes <= cluster.eager and cluster.eager > 0
        self.is_eager = sends and is_short and not cluster.async_progress

    def post(self) -> "MessageEnd":
        now = self.rank.arrive()
        if library.PROC_NULL in (self.source, self.target):
            self.begun = self.end = now
            self.tag, self.nbytes = ANY_TAG, 0
        elif self.sends:
            self._leave(now)
        else:
            sends = self.context.sends[self.target]
            send = next((one for one in sends if self.takes(one)), None)
            if send is None:
                self.context.receives[self.target].append(self)
            else:
                sends.remove(send)
                send.meet(self, now)
        return self

    def takes(self, send: "MessageEnd") -> bool:
        """Whether it receives that message."""
        return self.source in (ANY_SOURCE, send.source) and self.tag in (ANY_TAG, send.tag)

    def lying(self) -> str:
        """Messages that have come on its communicator, for a receive that takes none of them."""
        there = [] if self.sends else list(self.context.sends[self.target])
        members = self.context.members
        told = [f"rank {members[one.source]} with tag {one.tag}" for one in there]
        return f"; there lies a message of {', of '.join(dict.fromkeys(told[:4]))}" if told else ""

    def _leave(self, now: float) -> None:
        """The whole of a small message leaves, or the header of another."""
        cluster = self.rank.cluster
        receiver = cluster.ranks[self.context.members[self.target]]
        reach = partial(self._reach, receiver)
        if self.is_eager:
            self.data = self.data.copy()
            route = self.rank.number, receiver.number
            self.begun, there = cluster.links.small(*route, self.nbytes, now)
            self.end = now
            self.rank.note(now, self)
            cluster.within(receiver, there, reach)
        else:
            cluster.tell(self.rank, receiver, now, reach)

    def _reach(self, receiver: Any, now: float) -> None:
        """The receiver learns of it."""
        receives = self.context.receives[self.target]
        receive = next((one for one in receives if one.takes(self)), None)
        if receive is None:
            self.context.sends[self.target].append(self)
            receiver.note(now, self)  # for a probe
        else:
            receives.remove(receive)
            self.meet(receive, now)

    def meet(self, receive: "MessageEnd", now: float) -> None:
        """Its receive takes it, and answers if its bytes are not there yet."""
        if self.is_eager:
            self._fill(receive)
            receive.begun, receive.end = self.begun, now
            receive.rank.note(now, receive)
        else:
            self.begun = inf
            answered = partial(self._move, receive, 0)
            self.rank.cluster.tell(receive.rank, self.rank, now, answered)

    def _move(self, receive: "MessageEnd", moved: int, now: float) -> None:
        """Carries the bytes behind those that have ``moved`` over to the other end."""
        cluster, route = self.rank.cluster, (self.rank.number, receive.rank.number)
        piece, part, buffered = self.nbytes - moved, 1.0, not cluster.async_progress
        if buffered:
            piece, part = min(piece, BUFFER), THIRD
        begin, left = cluster.links.transfer(*route, piece, now)
        self.begun, moved = min(self.begun, begin), moved + piece
        if moved < self.nbytes:
            cluster.within(self.rank, left, partial(self._move, receive, moved))
            return
        self._fill(receive)
        there = left + part * cluster.links.latency(*route)
        receive.begun = self.begun
        for one, end in ((self, begin if buffered else there), (receive, there)):
            one.end = end  # a socket has the rest of a send
            one.rank.note(end, one)

    def _fill(self, receive: "MessageEnd") -> None:
        if receive.data is None:
            receive.result = bytes(self.data)
        elif receive.nbytes < self.nbytes:
            receive.error = library.Exception(library.ERR_TRUNCATE)
        else:
            receive.data[: self.nbytes] = self.data
        receive.source, receive.tag, receive.nbytes = self.source, self.tag, self.nbytes

    def cancel(self) -> None:
        """Ends a receive that no message has met; all other messages go on."""
        if not self.sends and self in (waiting := self.context.receives[self.target]):
            waiting.remove(self)
            self.end, self.is_cancelled = self.rank.arrive(), True
            self.source, self.tag, self.nbytes = ANY_SOURCE, ANY_TAG, 0
            self.rank.note(self.end, self)

    def tell(self, status: Any) -> None:
        """Writes where the message came from into a status of MPI."""
        write(status, self.source, self.tag, self.nbytes, self.is_cancelled)


def write(
    status: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, nbytes: int = 0, is_no: bool = False
) -> None:
    """Writes into a status of MPI, if there is one; ``is_no``: that of a message cancelled."""
    if status is not None:
        status.source, status.tag = source, tag
        status.Set_elements(library.BYTE, nbytes)
        status.Set_cancelled(is_no)
