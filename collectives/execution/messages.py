"""Binds a schedule to buffers and a transport, once, so that running it is a short flat loop."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np

from collectives import extras
from collectives.errors import InvalidBuffer, ScheduleError
from collectives.execution.memory import Combine, Items, Memory, is_queued
from collectives.execution.plan import Action, Binding, BoundRound, Plan, plan_class
from collectives.execution.tags import Tags
from collectives.execution.traffic import Traffic
from collectives.execution.transport import Bytes, Request, Transport
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send

#: Tags of one plan; messages between two ranks cycle through them.
TAGS_PER_PLAN = 64


@dataclass(frozen=True)
class Layout:
    """Where the chunks of a buffer begin: its blocks begin at ``starts``, the last one is its end.

    The first pieces of a block whose length is no multiple of ``chunks`` have one item more.
    """

    starts: Sequence[int]
    chunks: int

    @classmethod
    def even(cls, count: int, blocks: int, chunks: int) -> Self:
        """Blocks of ``count`` items each."""
        return cls(range(0, blocks * count + 1, count) if count else (0,) * (blocks + 1), chunks)

    @classmethod
    def of(cls, counts: Sequence[int], chunks: int) -> Self:
        """Blocks of these lengths, one behind the other."""
        return cls((0, *accumulate(counts)), chunks)

    def offset(self, i: int) -> int:
        """The item at which chunk ``i`` begins."""
        block, piece = divmod(i, self.chunks)
        start = self.starts[block]
        if not piece:
            return start
        length, longer = divmod(self.starts[block + 1] - start, self.chunks)
        return start + piece * length + min(piece, longer)

    def items(self, chunk: Chunk) -> slice:
        return slice(self.offset(chunk.start), self.offset(chunk.stop))


class Counts(NamedTuple):
    """Items of each block of a send and a receive buffer, where they are not all equal."""

    send: Sequence[int]
    recv: Sequence[int]


@dataclass
class _Binder:
    """Turns one rank's ``program`` into calls."""

    program: list[Round]
    transport: Transport
    buffers: dict[str, Items]
    layouts: dict[str, Layout]
    combine: Combine | None
    turns: "Turns"
    memory: Memory
    traffic: Traffic | None

    def view(self, chunk: Chunk) -> Items:
        return self.buffers[chunk.buffer][self.layouts[chunk.buffer].items(chunk)]

    def rounds(self) -> list[BoundRound]:
        """The rounds that have something to do; chunks of no items move nothing."""
        most = max(map(self.arriving, self.program), default=0)
        arrivals = self.memory.empty(most, self.buffers["recvbuf"].dtype)
        bound = [r for r in (self.round(steps, arrivals) for steps in self.program) if r.starts]
        return extras.gated(bound, self.memory) if is_queued(self.memory) else bound

    def arriving(self, steps: Round) -> int:
        """Items that are kept aside until they are reduced."""
        return sum(self.view(step.chunk).size for step in steps if isinstance(step, RecvReduce))

    def round(self, steps: Round, arrivals: Items) -> BoundRound:
        bound = BoundRound()
        sent = [self.view(step.chunk) for step in steps if isinstance(step, Send)]
        sends: list[Request] = []
        copies: list[Action] = []
        late: list[Action] = []
        held: list[Items] = []  # what late reductions read and write
        for step in steps:
            target = self.view(step.chunk)
            if not target.size:
                continue
            if isinstance(step, Copy):
                source = self.view(step.source)
                # In place, the block is there already.
                if self.memory.address(source) != self.memory.address(target):
                    copies.append(partial(self.memory.copy, target, source))
                continue
            tag = self.turns.tag(step)
            if isinstance(step, Send):
                parts = self.parts(target)
                sends += [self.transport.send_init(part, step.peer, tag) for part in parts]
                continue
            arriving = target
            if isinstance(step, RecvReduce):
                arriving, arrivals = arrivals[: target.size], arrivals[target.size :]
            for part in self.parts(arriving):
                bound.add([self.transport.recv_init(part, step.peer, tag)])
            if isinstance(step, RecvReduce):
                reduction = self.reduction(step, arriving, target)
                bound.reductions.append(reduction)
                # A chunk that this round also sends must not change before it has left, and what is
                # reduced after that must not use it earlier.
                used = target, self.view(step.operand or step.chunk)
                busy = any(self.overlap(target, other) for other in sent)
                busy = busy or any(self.overlap(one, other) for one in used for other in held)
                held += used if busy else ()
                (late if busy else bound.finish).append(reduction)
        # Sends first: where two ranks exchange over one connection, a receive that is posted before
        # would answer the other's header, whose bytes then hold up the answer to ours (Open MPI).
        bound.starts = [*(request.Start for request in (*sends, *bound.requests)), *copies]
        if self.traffic is not None and sends:
            nbytes = sum(items.nbytes for items in sent)
            bound.starts.append(partial(self.traffic.send, len(sends), nbytes))
        bound.add(sends)
        bound.finish += late
        return bound

    def reduction(self, step: RecvReduce, arrived: Items, target: Items) -> Action:
        if self.combine is None:
            raise ScheduleError(f"{step} reduces, but no operation was given")
        own = self.view(step.operand or step.chunk)
        operands = (arrived, own) if step.peer < self.transport.rank else (own, arrived)
        return self.memory.reduction(self.combine, *operands, target)

    def overlap(self, one: Items, other: Items) -> bool:
        first, second = self.memory.address(one), self.memory.address(other)
        return first < second + other.nbytes and second < first + one.nbytes

    def parts(self, items: Items) -> list[Bytes]:
        """The memory of ``items``, in parts that the transport can send."""
        memory, longest = items.view(np.uint8), self.transport.longest
        return [memory[start : start + longest] for start in range(0, memory.size, longest)]


class Turns:
    """Tags of a plan's messages: the k-th from one rank to another has the same at both ends."""

    def __init__(self, tags: Tags | None) -> None:
        self._first = 0 if tags is None else (tags.number + 1) * TAGS_PER_PLAN
        self._messages: Counter[tuple[bool, int]] = Counter()

    def tag(self, step: Send | Recv | RecvReduce) -> int:
        """The tag of the next message of this step's direction and peer."""
        route = isinstance(step, Send), step.peer
        self._messages[route] += 1
        return self._first + (self._messages[route] - 1) % TAGS_PER_PLAN


@dataclass(frozen=True)
class Operands:
    """The arrays of one rank in a collective, and what has to be copied.

    Attributes:
        send: contiguous 1-D array; ``None`` for in place (``recv`` holds the input), or if this
            rank has none.
        recv: contiguous 1-D array of the same dtype; ``None`` if this rank has none, or at the root
            of a scatter for in place.
        counts: lengths of the blocks of a v-variant; otherwise all are equal.
        aside: the input lies where the schedule writes, and is copied aside first.
        before, after: done first and last in each run.
    """

    send: Items | None
    recv: Items | None
    counts: Counts | None = None
    aside: bool = False
    before: Sequence[Action] = ()
    after: Sequence[Action] = ()


def bind(
    schedule: Schedule,
    transport: Transport,
    operands: Operands,
    combine: Combine | None = None,
    binding: Binding | None = None,
) -> Plan:
    """A plan for ``schedule`` on these operands.

    Args:
        combine: the reduction, for a collective that reduces.

    Raises:
        InvalidBuffer: the sizes do not fit the collective.
    """
    binding = binding or Binding()
    memory, turns = binding.memory, Turns(binding.tags)
    ready = prepared(schedule, transport.rank, operands, memory)
    layout = ready.layouts["workspace"]
    room = layout.offset(schedule.workspace) if schedule.workspace else 0
    buffers = {**ready.buffers, "workspace": memory.empty(room, ready.dtype)}
    if combine is not None:
        combine = memory.combine(combine)
    traffic = binding.progress.traffic
    program = list(schedule.rounds(transport.rank))
    given = program, transport, buffers, ready.layouts, combine, turns, memory, traffic
    rounds = ready.around(_Binder(*given).rounds(), operands.after)
    return plan_class(binding)(
        schedule.collective, schedule.algorithm, ready.nbytes, rounds, transport.testall, binding
    )


class Prepared(NamedTuple):
    """The buffers of one rank as its steps name them.

    Attributes:
        buffers: ``sendbuf`` and ``recvbuf``, without items where the rank has none.
        layouts: the layouts of these and of ``workspace``.
        before: the actions before the first round.
    """

    buffers: dict[str, Items]
    layouts: dict[str, Layout]
    before: list[Action]

    @property
    def dtype(self) -> "np.dtype[Any]":
        return self.buffers["recvbuf"].dtype

    @property
    def nbytes(self) -> int:
        """Size of the larger buffer."""
        return max(items.nbytes for items in self.buffers.values())

    def around(self, rounds: list[BoundRound], after: Sequence[Action]) -> list[BoundRound]:
        """The rounds of a run with what comes before and after them."""
        first = [BoundRound(starts=self.before)] if self.before else []
        return [*first, *rounds, *([BoundRound(starts=list(after))] if after else [])]


def prepared(schedule: Schedule, rank: int, operands: Operands, memory: Memory) -> Prepared:
    """The buffers of ``rank``: in place, its part of the other one; copied aside if need be.

    Raises:
        InvalidBuffer: the sizes do not fit the collective.
    """
    send, recv, aside = operands.send, operands.recv, operands.aside
    member, blocks = schedule.member(rank), schedule.contract
    layouts = _layouts(schedule, rank, send, recv, operands.counts)
    if send is None and blocks.send_blocks(member):
        first = blocks.place(member)
        if first is None or recv is None:
            raise InvalidBuffer(f"{schedule.collective}: only the root can pass MPI.IN_PLACE")
        start = layouts["recvbuf"].offset(first)
        send = recv[start : start + layouts["sendbuf"].starts[-1]]
        aside = aside or not schedule.in_place
    elif recv is None and blocks.recv_blocks(member):
        assert send is not None, "there is one buffer at least"
        own = Chunk("sendbuf", member.rank * schedule.chunks, (member.rank + 1) * schedule.chunks)
        recv = send[layouts["sendbuf"].items(own)]
    before = list(operands.before)
    if aside and send is not None:
        copy = memory.empty(send.size, send.dtype)
        before.append(partial(memory.copy, copy, send))
        send = copy
    nothing = memory.empty(0, next(items.dtype for items in (recv, send) if items is not None))
    buffers = {"sendbuf": send, "recvbuf": recv}
    named = {name: nothing if items is None else items for name, items in buffers.items()}
    return Prepared(named, layouts, before)


def _layouts(
    schedule: Schedule, rank: int, send: Items | None, recv: Items | None, counts: Counts | None
) -> dict[str, Layout]:
    """The layout of each buffer of ``rank``, by name; the given sizes must fit."""
    member, n = schedule.member(rank), schedule.chunks
    blocks = {
        "sendbuf": schedule.contract.send_blocks(member),
        "recvbuf": schedule.contract.recv_blocks(member),
    }
    if counts is not None:
        for role, items, lengths in (("send", send, counts.send), ("receive", recv, counts.recv)):
            if items is not None and items.size < sum(lengths):
                raise InvalidBuffer(
                    f"{schedule.collective}: the {role} buffer has {items.size} items, but the "
                    f"counts say {sum(lengths)}"
                )
        layouts = {"sendbuf": Layout.of(counts.send, n), "recvbuf": Layout.of(counts.recv, n)}
        more = max(layouts.values(), key=lambda layout: len(layout.starts))
        return {**layouts, "workspace": more}
    given = {"recvbuf": recv, "sendbuf": send}
    sized = [name for name, items in given.items() if items is not None and blocks[name]]
    items = given[sized[0]] if sized else None
    count, rest = divmod(items.size, blocks[sized[0]]) if items is not None else (0, 0)
    if rest and items is not None:
        role = "receive" if sized[0] == "recvbuf" else "send"
        raise InvalidBuffer(
            f"{schedule.collective}: the {role} buffer of {items.size} items is not a multiple of "
            f"the {blocks[sized[0]]} blocks that {schedule.size} ranks need"
        )
    if len(sized) == 2 and send is not None and recv is not None:
        expected = count * blocks["sendbuf"]
        if send.size != expected:
            raise InvalidBuffer(
                f"{schedule.collective}: the send buffer has {send.size} items, but {expected} go "
                f"with a receive buffer of {recv.size} on {schedule.size} ranks"
            )
    blocks["workspace"] = -(-schedule.workspace // n)
    return {name: Layout.even(count, number, n) for name, number in blocks.items()}
