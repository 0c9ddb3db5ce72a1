"""Runs a schedule on real data with all ranks in this process: for tests, teaching and notebooks.

A message moves when both of its ends have started, as under MPI's rendezvous protocol, so what
hangs here can hang there.

>>> from collectives.algorithms import build
>>> run(build("allreduce", "ring", 3), [np.array([1, 2]), np.array([3, 4]), np.array([5, 6])])
[array([ 9, 12]), array([ 9, 12]), array([ 9, 12])]
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.errors import ScheduleError
from collectives.execution.memory import Combine, Items
from collectives.execution.messages import Counts, Operands, bind
from collectives.execution.plan import Plan
from collectives.execution.transport import Bytes
from collectives.schedule import Schedule


def run(
    schedule: Schedule,
    inputs: Sequence[Items],
    combine: Combine = np.add,
    *,
    in_place: bool = False,
    counts: Sequence[Counts] | None = None,
) -> list[Items | None]:
    """Every rank's receive buffer, ``None`` for a rank that has none.

    Args:
        inputs: one 1-D array for each rank, of equal dtype; empty where a rank has nothing to send.
        in_place: put each input where ``MPI.IN_PLACE`` expects it and pass no send buffer.
        counts: one for each rank, of a v-variant.

    Raises:
        ScheduleError: if the ranks wait for one another for ever.
    """
    blocks, root = schedule.contract, schedule.member(schedule.root)
    count = inputs[schedule.root].size // blocks.send_blocks(root)
    plans: list[Plan] = []
    outputs: list[Items | None] = []
    for transport, items in zip(connect(schedule.size), inputs, strict=True):
        rank = transport.rank
        member = schedule.member(rank)._replace(chunks=1)
        length = sum(counts[rank].recv) if counts else count * blocks.recv_blocks(member)
        output = np.zeros(length, items.dtype) if blocks.recv_blocks(member) else None
        send: Items | None = items if blocks.send_blocks(member) else None
        first = blocks.place(member) if in_place else None
        if first is not None and output is not None:
            start = sum(counts[rank].recv[:first]) if counts else first * count
            output[start : start + items.size] = items
            send = None
        shape = counts[rank] if counts else None
        plans.append(bind(schedule, transport, Operands(send, output, shape), combine))
        outputs.append(output)
    for plan in plans:
        plan.Start()
    waiting = list(plans)
    while waiting:
        reached = [plan.completed for plan in waiting]
        waiting = [plan for plan in waiting if not plan.Test()]
        if waiting and [plan.completed for plan in waiting] == reached:
            raise ScheduleError(f"{schedule}: the ranks wait for one another for ever")
    return outputs


Mailbox = defaultdict[tuple[int, int, int], deque["LocalRequest"]]


@dataclass(eq=False)
class LocalRequest:
    """One end of a message; ``mine`` and ``theirs`` are the queues of waiting ends."""

    data: Bytes
    sends: bool
    mine: deque["LocalRequest"]
    theirs: deque["LocalRequest"]
    done: bool = True

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
        self.rank, self.size = rank, size
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
