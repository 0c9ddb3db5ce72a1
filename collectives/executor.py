"""Binds a schedule to buffers and a transport, once, so that running it is a short flat loop."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from collectives.contracts import contract, place
from collectives.errors import InvalidBuffer, ScheduleError
from collectives.plan import Action, BoundRound, Plan
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send
from collectives.transport import Bytes, Request, Transport

Items = npt.NDArray[Any]


class Combine(Protocol):
    """A reduction of two arrays, as NumPy's functions are."""

    def __call__(self, left: Items, right: Items, /, *, out: Items) -> object:
        """Puts ``left (op) right`` into ``out``, which may be either of them."""


#: Tags of one plan; messages between two ranks cycle through them.
TAGS_PER_PLAN = 64


@dataclass(frozen=True)
class Layout:
    """Where chunk ``i`` of a buffer made of blocks of ``count`` items begins."""

    count: int
    chunks: int

    def offset(self, i: int) -> int:
        """The first ``count mod chunks`` pieces of a block have one item more than the others."""
        block, piece = divmod(i, self.chunks)
        length, longer = divmod(self.count, self.chunks)
        return block * self.count + piece * length + min(piece, longer)

    def items(self, chunk: Chunk) -> slice:
        return slice(self.offset(chunk.start), self.offset(chunk.stop))


class _Binder:
    """Turns one rank's rounds into calls."""

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        memory: dict[str, Items],
        layout: Layout,
        combine: Combine | None,
        tag: int,
    ) -> None:
        self.transport = transport
        self.memory = memory
        self.layout = layout
        self.combine = combine
        self.tag = tag
        self.programme = list(schedule.rounds(transport.rank))
        self.messages: dict[tuple[type, int], int] = {}

    def view(self, chunk: Chunk) -> Items:
        return self.memory[chunk.buffer][self.layout.items(chunk)]

    def rounds(self) -> list[BoundRound]:
        """The rounds that have something to do; chunks of no items move nothing."""
        arrivals = np.empty(
            max(map(self.arriving, self.programme), default=0), self.memory["recvbuf"].dtype
        )
        bound = (self.round(steps, arrivals) for steps in self.programme)
        return [r for r in bound if r.starts]

    def arriving(self, steps: Round) -> int:
        """Items that have to be kept aside until they are reduced."""
        return sum(self.view(step.chunk).size for step in steps if isinstance(step, RecvReduce))

    def round(self, steps: Round, arrivals: Items) -> BoundRound:
        bound = BoundRound()
        sent = [self.view(step.chunk) for step in steps if isinstance(step, Send)]
        sends: list[Request] = []
        copies: list[Action] = []
        late: list[Action] = []
        for step in steps:
            target = self.view(step.chunk)
            if not target.size:
                continue
            if isinstance(step, Copy):
                source = self.view(step.source)
                if _address(source) != _address(target):  # in place, the block is there already
                    copies.append(partial(np.copyto, target, source))
                continue
            tag = self.next_tag(step)
            if isinstance(step, Send):
                sends.append(self.transport.send_init(_bytes(target), step.peer, tag))
                continue
            arriving = target
            if isinstance(step, RecvReduce):
                arriving, arrivals = arrivals[: target.size], arrivals[target.size :]
            request = self.transport.recv_init(_bytes(arriving), step.peer, tag)
            bound.requests.append(request)
            bound.finish.append(request.Wait)
            if isinstance(step, RecvReduce):
                reduction = self.reduction(step, arriving, target)
                bound.reductions.append(reduction)
                # A chunk that this round also sends must not change before it has left.
                busy = any(np.may_share_memory(target, other) for other in sent)
                (late if busy else bound.finish).append(reduction)
        # Receives first: a message that finds its receive posted is copied once.
        bound.starts = [*(request.Start for request in (*bound.requests, *sends)), *copies]
        bound.finish += [*(request.Wait for request in sends), *late]
        bound.requests += sends
        return bound

    def reduction(self, step: RecvReduce, arrived: Items, target: Items) -> Action:
        if self.combine is None:
            raise ScheduleError(f"{step} reduces, but no operation was given")
        own = self.view(step.operand or step.chunk)
        operands = (arrived, own) if step.peer < self.transport.rank else (own, arrived)
        return partial(self.combine, *operands, out=target)

    def next_tag(self, step: Send | Recv | RecvReduce) -> int:
        """The k-th message from one rank to another has the same tag at both ends."""
        route = (Send if isinstance(step, Send) else Recv, step.peer)
        k = self.messages.get(route, 0)
        self.messages[route] = k + 1
        return self.tag + k % TAGS_PER_PLAN


def bind(
    schedule: Schedule,
    transport: Transport,
    send: Items | None,
    recv: Items,
    combine: Combine | None = None,
    *,
    tag: int = 0,
    reason: str = "asked for",
    active: list[Plan] | None = None,
) -> Plan:
    """A plan for ``schedule`` on these buffers.

    Args:
        send: contiguous 1-D array, or ``None`` for in place (``recv`` holds the input).
        recv: contiguous 1-D array of the same dtype, of the contract's number of equal blocks.
        combine: the reduction, for a collective that reduces.
        tag: first of ``TAGS_PER_PLAN`` tags that no other plan under way uses.
        active: plans of the same communicator that are under way (kept up to date by the plans).

    Raises:
        InvalidBuffer: if the sizes do not fit the collective.
    """
    blocks = contract(schedule.collective)
    count, rest = divmod(recv.size, blocks.recv_blocks(schedule.size))
    if rest:
        raise InvalidBuffer(
            f"{schedule.collective}: the receive buffer of {recv.size} items is not a multiple of "
            f"the {blocks.recv_blocks(schedule.size)} blocks that {schedule.size} ranks need"
        )
    expected = count * blocks.send_blocks(schedule.size)
    if send is not None and send.size != expected:
        raise InvalidBuffer(
            f"{schedule.collective}: the send buffer has {send.size} items, but {expected} go with "
            f"a receive buffer of {recv.size} on {schedule.size} ranks"
        )
    layout = Layout(count, schedule.chunks)
    prepare: list[Action] = []
    if send is None:
        offset = layout.offset(place(blocks, transport.rank, schedule.chunks))
        send = recv[offset : offset + expected]
        if not schedule.in_place:
            aside = np.empty_like(send)
            prepare = [partial(np.copyto, aside, send)]
            send = aside
    memory = {
        "sendbuf": send,
        "recvbuf": recv,
        "workspace": np.empty(layout.offset(schedule.workspace), recv.dtype),
    }
    rounds = _Binder(schedule, transport, memory, layout, combine, tag).rounds()
    if prepare:
        rounds.insert(0, BoundRound(starts=prepare))
    return Plan(
        schedule.collective,
        schedule.algorithm,
        reason,
        max(send.nbytes, recv.nbytes),
        rounds,
        transport.testall,
        [] if active is None else active,
    )


def _address(items: Items) -> int:
    address: int = items.__array_interface__["data"][0]
    return address


def _bytes(items: Items) -> Bytes:
    return items.view(np.uint8)
