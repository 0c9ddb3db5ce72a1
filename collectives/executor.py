"""Binds a schedule to buffers and a transport, once, so that running it is a short flat loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.contracts import contract
from collectives.errors import InvalidBuffer
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send
from collectives.transport import Bytes, Request, Transport

Items = npt.NDArray[Any]
Action = Callable[[], object]
#: ``combine(left, right, out)``; ``out`` may be either operand.  NumPy's ufuncs are of this kind.
Combine = Callable[[Items, Items, Items], object]

#: Larger messages move in pieces of this many bytes, so that a piece is reduced while it is still
#: in the cache and while the next one moves.
PIECE_BYTES = 1 << 20
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


@dataclass
class BoundRound:
    """One round, as the calls that carry it out.

    Attributes:
        starts: start the messages, then make the local copies.
        requests: the messages, for polling.
        finish: the waits, each reduction as early as its operands allow.
        reductions: the reductions alone, for after a successful poll.
    """

    starts: list[Action] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    finish: list[Action] = field(default_factory=list)
    reductions: list[Action] = field(default_factory=list)


class Plan:
    """A collective that is bound to its buffers; MPI would call it a persistent request.

    Call it to run it, or ``Start`` it, ``Test`` it now and then (nothing advances in between), and
    ``Wait`` for it.  Like any collective, all ranks must start their plans in the same order.

    Attributes:
        algorithm: name of the algorithm, with its options.
        reason: why it was chosen.
        collective: name of the collective.
        nbytes: size of the larger buffer.
    """

    def __init__(
        self,
        collective: str,
        algorithm: str,
        reason: str,
        nbytes: int,
        rounds: list[BoundRound],
        testall: Callable[[Sequence[Any]], bool],
        active: "list[Plan]",
    ) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.reason = reason
        self.nbytes = nbytes
        self._rounds = rounds
        self._testall = testall
        self._active = active
        self._program = [call for r in rounds for call in (*r.starts, *r.finish)]
        self._next = len(rounds)

    def __call__(self) -> None:
        """Runs the collective to its end."""
        if self._active:  # another plan is under way, and its peers may need us to go on with it
            self.Start()
            self.Wait()
            return
        for call in self._program:
            call()

    def Start(self) -> None:
        """Starts the first round; the buffers are not the caller's until the plan has completed."""
        if self._next < len(self._rounds):
            raise RuntimeError(f"{self!r} was started twice without Wait or a true Test in between")
        self._next = 0
        self._active.append(self)
        self._start_round()

    def Test(self) -> bool:
        """Goes on as far as the messages allow; returns whether the collective has completed."""
        while self._next < len(self._rounds):
            current = self._rounds[self._next]
            if current.requests and not self._testall(current.requests):
                return False
            for call in current.reductions:
                call()
            self._next += 1
            self._start_round()
        return True

    def Wait(self) -> None:
        """Completes the collective; other plans that are under way go on meanwhile."""
        while len(self._active) > 1 and not self.Test():
            for plan in tuple(self._active):
                plan.Test()
        while self._next < len(self._rounds):
            for call in self._rounds[self._next].finish:
                call()
            self._next += 1
            self._start_round()

    @property
    def progress(self) -> int:
        """Rounds completed since ``Start``."""
        return self._next

    def Free(self) -> None:
        """Releases the requests; the plan cannot be used after it."""
        for bound in self._rounds:
            for request in bound.requests:
                request.Free()
        self._rounds, self._program, self._next = [], [_freed], 0

    def _start_round(self) -> None:
        if self._next == len(self._rounds):
            self._active.remove(self)
            return
        for call in self._rounds[self._next].starts:
            call()

    def __repr__(self) -> str:
        return f"<Plan: {self.collective} by {self.algorithm} of {self.nbytes} bytes>"


def _freed() -> None:
    raise RuntimeError("this plan was freed")


class _Binder:
    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        memory: dict[str, tuple[Items, Layout]],
        combine: Combine | None,
        tag: int,
        piece_bytes: int,
    ) -> None:
        self.schedule = schedule
        self.transport = transport
        self.memory = memory
        self.combine = combine
        self.tag = tag
        self.dtype = memory["recvbuf"][0].dtype
        self.piece = max(1, piece_bytes // self.dtype.itemsize)
        self.messages: dict[tuple[type, int], int] = {}

    def view(self, chunk: Chunk) -> Items:
        items, layout = self.memory[chunk.buffer]
        return items[layout.items(chunk)]

    def rounds(self) -> list[BoundRound]:
        programme = list(self.schedule.rounds(self.transport.rank))
        arrivals = np.empty(max(map(self.reduced_items, programme), default=0), self.dtype)
        bound = (self.round(steps, arrivals) for steps in programme)
        return [r for r in bound if r.starts]

    def reduced_items(self, steps: Round) -> int:
        return sum(self.view(step.chunk).size for step in steps if isinstance(step, RecvReduce))

    def round(self, steps: Round, arrivals: Items) -> BoundRound:
        bound = BoundRound()
        sent = [self.view(step.chunk) for step in steps if isinstance(step, Send)]
        sends: list[Request] = []
        late: list[Action] = []
        copies: list[Action] = []
        for step in steps:
            target = self.view(step.chunk)
            if not target.size:
                continue
            match step:
                case Copy(_, source):
                    copies.append(partial(np.copyto, target, self.view(source)))
                case Send(peer, _):
                    for piece in self.pieces(target):
                        sends.append(
                            self.transport.send_init(_bytes(piece), peer, self.next_tag(step))
                        )
                case Recv(peer, _):
                    for piece in self.pieces(target):
                        request = self.transport.recv_init(_bytes(piece), peer, self.next_tag(step))
                        bound.requests.append(request)
                        bound.finish.append(request.Wait)
                case RecvReduce(peer, chunk, operand):
                    arriving, arrivals = arrivals[: target.size], arrivals[target.size :]
                    own = self.view(operand or chunk)
                    # A chunk that this round also sends must not change before it has left.
                    busy = any(np.may_share_memory(target, other) for other in sent)
                    for piece, left, right in zip(*map(self.pieces, (arriving, own, target))):
                        request = self.transport.recv_init(_bytes(piece), peer, self.next_tag(step))
                        bound.requests.append(request)
                        bound.finish.append(request.Wait)
                        operands = (piece, left) if peer < self.transport.rank else (left, piece)
                        assert self.combine is not None
                        reduction = partial(self.combine, *operands, right)
                        (late if busy else bound.finish).append(reduction)
                        bound.reductions.append(reduction)
        # Receives first: a message that finds its receive posted is copied once.
        bound.starts = [request.Start for request in (*bound.requests, *sends)] + copies
        bound.finish += [request.Wait for request in sends] + late
        bound.requests += sends
        return bound

    def pieces(self, items: Items) -> Iterator[Items]:
        return (items[i : i + self.piece] for i in range(0, items.size, self.piece))

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
    piece_bytes: int = PIECE_BYTES,
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
        offset = layout.offset(blocks.in_place(transport.rank, schedule.chunks))
        send = recv[offset : offset + expected]
        if not schedule.in_place:
            aside = np.empty_like(send)
            prepare = [partial(np.copyto, aside, send)]
            send = aside
    workspace = np.empty(layout.offset(schedule.workspace), recv.dtype)
    memory = {
        "sendbuf": (send, layout),
        "recvbuf": (recv, layout),
        "workspace": (workspace, layout),
    }
    rounds = _Binder(schedule, transport, memory, combine, tag, piece_bytes).rounds()
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


def _bytes(items: Items) -> Bytes:
    return items.view(np.uint8)
