"""Binds a schedule to memory that all its ranks can address: messages become loads and stores.

A ``RecvReduce`` reads its operand where it lies, in the sender's buffer; a ``Send`` that meets a
``Recv`` is stored by the sender into the receiver's buffer, while it is in the sender's cache.
With the direct all-reduce in segments this is "the owner of a slice reduces it and stores it to all
outputs": 2 p s bytes of loads and stores for p ranks of s bytes, against 11 s (p-1) of a ring that
copies into and out of shared memory (Peng et al., "YHCCL", SC 2023).

On GPUs that map one another's memory, a ``RecvReduce`` is one kernel that reads the other's, and a
rank says how far it has come when a gate tells that its stream has.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.algorithms.segments import passes_on, segmented
from collectives.analysis.dataflow import Cell, Dataflow, Endpoint, entered, moved
from collectives.errors import ScheduleError
from collectives.execution.device_plan import DevicePlan, Gate, behind
from collectives.execution.lanes import Lane
from collectives.execution.memory import HOST, Combine, Items, Memory, is_queued
from collectives.execution.messages import Layout
from collectives.execution.plan import Action, BoundRound, Plan
from collectives.execution.transport.flags import BLOCKING, Flag
from collectives.execution.transport.windows import Edge, Place
from collectives.execution.underway import Underway
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send

if TYPE_CHECKING:
    from collectives.execution.transport.shared_memory import NodeMemory

#: Chunks are cut into segments of about this size: what is reduced, or sent, is stored to the
#: others while it is in a level-2 cache of 1 MiB, together with where it came from.
SEGMENT_BYTES = 1 << 19
#: And where nothing is used again: C libraries store long copies past the cache, if at all.
COPIED_BYTES = 1 << 22


#: For each rank, where its send and its receive buffer lie; ``None``: in place, or it has none.
Places = tuple[tuple[Place | None, Place | None], ...]
#: A rank's arrays, as its caller gave them.
Own = tuple[Items | None, Items | None]


def runs_shared(schedule: Schedule, places: Places) -> bool:
    """Whether ``schedule`` needs no other memory than the buffers, and ranks may wait for whole
    rounds of one another."""
    return (
        not schedule.workspace
        and (schedule.in_place or not _is_in_place(schedule, places))
        and schedule.aligned
    )


def _is_in_place(schedule: Schedule, places: Places) -> bool:
    return any(
        send is None and schedule.contract.send_blocks(schedule.member(rank))
        for rank, (send, _) in enumerate(places)
    )


def bind_shared(
    schedule: Schedule,
    node: "NodeMemory",
    places: Places,
    count: int,
    dtype: "np.dtype[Any]",
    memory: Memory,
    combine: Combine | None,
    *,
    lane: Lane | None,
    reason: str,
    underway: Underway,
    binder: "type[SharedBinder]",
    own: Own = (None, None),
    met: bool = False,
) -> Plan:
    """A plan for ``schedule`` on arrays that lie in the node's memory.

    Args:
        places: where all ranks' buffers lie, which :func:`runs_shared` must allow.
        count: items of a block.
        memory: the kind of memory that all buffers are in.
        lane: tells its counters from other plans' under way; ``None`` for a blocking call's plan,
            which names the memory by address and does not keep it.
        binder: of memory that all ranks map, or that they read in one another's processes.
        own: this rank's send and receive buffer, where the node's memory does not keep them.
        met: whenever the plan runs, the ranks have just met, so each knows that all are in it.
    """
    slot = BLOCKING if lane is None else BLOCKING + 1 + lane.number
    blocks = schedule.contract.blocks(schedule.size)
    if not is_queued(memory):  # a GPU is better off with few kernels
        largest = -(-count // schedule.chunks) * dtype.itemsize
        if largest > SEGMENT_BYTES:
            most = SEGMENT_BYTES if passes_on(schedule) else COPIED_BYTES
            schedule = segmented(schedule, -(-largest // most))
    layout = Layout.even(count, blocks, schedule.chunks)
    buffers = []
    for rank in range(schedule.size):
        kept = own if rank == node.rank and lane is not None else (None, None)
        named = _buffers(schedule, rank, node, places[rank], count, memory.empty(0, dtype), kept)
        borrows = lane is None and not (binder.pulls and rank != node.rank)
        buffers.append({k: memory.borrowed(v) if borrows else v for k, v in named.items()})
    flow = Dataflow(schedule, _is_in_place(schedule, places), binder.pulls)
    combine = combine and memory.combine(combine)
    met = met and not (is_queued(memory) or node.has_edges(chain(*places)))
    bound = binder(flow, node, slot, memory, buffers, layout, combine, met)
    edges = _edges(node, places[node.rank], buffers[node.rank], borrow=lane is None)
    before: list[Action] = [partial(HOST.copy, copy, own) for own, copy in chain(*edges)]
    if lane is not None:  # a blocking call has just looked where its memory is
        own_places = [place for place in places[node.rank] if place is not None]
        before[:0] = [partial(node.expect_there, p) for p in own_places if node.has_edges([p])]
    if underway.traffic is not None:
        moved = _moved_bytes(flow, node.rank, layout, dtype)
        before.append(partial(underway.traffic.share, moved))
    after = [partial(HOST.copy, own, copy) for own, copy in edges[1]]
    make = partial(DevicePlan, memory=memory) if is_queued(memory) else Plan
    plan = make(
        schedule.collective,
        schedule.algorithm,
        reason,
        count * blocks * dtype.itemsize,
        bound.rounds(before, after),
        _all_reached,
        underway,
        lane,
    )
    for place in places[node.rank]:
        node.used_by(place, plan)
    return plan


def _buffers(
    schedule: Schedule,
    rank: int,
    node: "NodeMemory",
    places: tuple[Place | None, Place | None],
    count: int,
    nothing: Items,
    own: Own,
) -> dict[str, Items]:
    """The send and receive buffer of ``rank``, as this process addresses them."""
    member = schedule.member(rank)._replace(chunks=1)
    sent = count * schedule.contract.send_blocks(member)
    received = count * schedule.contract.recv_blocks(member)
    send_place, recv_place = places
    send = recv = nothing
    if send_place is not None:
        send = node.view(rank, send_place, sent, nothing.dtype) if own[0] is None else own[0]
    if recv_place is not None:
        recv = node.view(rank, recv_place, received, nothing.dtype) if own[1] is None else own[1]
    if send_place is None and sent:  # in place
        start = (schedule.contract.place(member) or 0) * count
        send = recv[start : start + sent]
    if recv_place is None and received:  # a scatter in place
        recv = send[rank * count :][:received]
    return {"sendbuf": send, "recvbuf": recv}


def _moved_bytes(flow: Dataflow, rank: int, layout: Layout, dtype: "np.dtype[Any]") -> int:
    """What a rank stores into others' memory, and loads from it, in one run."""
    items = 0
    for number, steps in enumerate(flow.programs[rank]):
        for position, step in enumerate(steps):
            end = Endpoint(rank, number, position)
            if not isinstance(step, Copy) and flow.mover(end) == rank:
                part = layout.items(step.chunk)
                items += part.stop - part.start
    return items * dtype.itemsize


def _edges(
    node: "NodeMemory",
    places: tuple[Place | None, Place | None],
    buffers: dict[str, Items],
    borrow: bool,
) -> tuple[list[Edge], list[Edge]]:
    """Of this rank's send and of its receive buffer."""
    found = []
    for place, name in zip(places, ("sendbuf", "recvbuf")):
        edges = node.edges(place, buffers[name].nbytes)
        found.append([Edge(*map(HOST.borrowed, edge)) for edge in edges] if borrow else edges)
    return found[0], found[1]


def _all_reached(flags: Sequence[Flag]) -> bool:
    return all(flag.Test() for flag in flags)


class Pending(NamedTuple):
    """A wait ``until`` a count of ``rank``, put off until ``cells`` are next used.

    ``reading`` says that the peer only reads them, so that this rank may go on reading them too.
    """

    cells: frozenset[Cell]
    reading: bool
    rank: int
    until: int


class SharedBinder:
    """Turns one rank's rounds into calls.

    Attributes:
        pulls: the others' memory is only read: a receiver copies what a sender would store.

    Args:
        flow: of the schedule, with in place as the caller has it.
        node: the ranks' memory; ``slot`` is that of the counters.
        memory: what kind of memory the buffers are in.
        buffers: for each rank, by name.
        met: all ranks are in it when it begins, and may use one another's memory.
    """

    pulls = False

    def __init__(
        self,
        flow: Dataflow,
        node: "NodeMemory",
        slot: int,
        memory: Memory,
        buffers: list[dict[str, Items]],
        layout: Layout,
        combine: Combine | None,
        met: bool,
    ) -> None:
        self.flow = flow
        self.node = node
        self.rank = node.rank
        self.slot = slot
        self.memory = memory
        self.buffers = buffers
        self.layout = layout
        self.combine = combine
        self.gate = Gate(memory.event()) if is_queued(memory) else None
        first = entered(0) if met else 0
        self.told = first  # the count that this rank's last tick says
        self.reached = [first] * node.size
        self.pending: list[Pending] = []

    def rounds(self, before: Sequence[Action], after: Sequence[Action]) -> list[BoundRound]:
        """The rounds of one run: ``before`` comes before any other rank uses this one's memory, and
        ``after`` when none does any more."""
        last = entered(self.flow.rounds)
        bound = [BoundRound(starts=[self.node.advance(self.slot, last + 1), *before])]
        for number, steps in enumerate(self.flow.programs[self.rank]):
            if steps:
                bound += self.round(number, steps)
        ending = self.wait(self.pending, [*after])
        if self.gate is None and not self.pulls:  # nobody waits for that
            return [*bound, ending]
        return [*bound, *self.ticking(ending, last)]

    def round(self, number: int, steps: Round) -> list[BoundRound]:
        due = [wait for wait in self.pending if self.is_due(wait, steps)]
        self.pending = [w for w in self.pending if w not in due]
        tells = self.flow.is_awaited(self.rank, self.told, entered(number))
        self.told = moved(number)
        entering = [self.wait(due, [])] if due or tells else []
        if tells:
            entering = self.ticking(entering[0], entered(number))

        moving = BoundRound()
        lent: list[Pending] = []  # what peers read of our memory in this round
        late: list[Action] = []
        # Stores first: the chunk that a round sends may be one that it then reduces into.
        in_order = sorted(enumerate(steps), key=lambda item: not isinstance(item[1], Send))
        for position, step in in_order:
            target = self.view(self.rank, step.chunk)
            if not target.size:
                continue
            cells = self.flow.cells(self.rank, step.chunk)
            if isinstance(step, Copy):
                self.add(moving, [], self.copy(target, self.view(self.rank, step.source)))
                continue
            other = self.flow.ends[Endpoint(self.rank, number, position)]
            theirs = self.flow.step(other)
            done = moved(other.round)
            remote = self.view(other.rank, theirs.chunk)
            match step:
                case Send() if self.pulls or isinstance(theirs, RecvReduce):
                    lent.append(Pending(cells, True, other.rank, done))
                case Send():
                    flags = self.flags(other.rank, self.flow.available(other))
                    self.add(moving, flags, self.copy(remote, target))
                case Recv() if self.pulls:
                    flags = self.flags(other.rank, self.flow.available(other))
                    self.add(moving, flags, self.copy(target, remote))
                case Recv():
                    self.pending.append(Pending(cells, False, other.rank, done))
                case RecvReduce():
                    flags = self.flags(other.rank, self.flow.available(other))
                    if any(wait.cells & cells for wait in lent):  # not ours to overwrite yet
                        aside = self.memory.empty(remote.size, remote.dtype)
                        self.add(moving, flags, self.copy(aside, remote))
                        late.append(self.reduction(step, aside, target))
                    else:
                        self.add(moving, flags, self.reduction(step, remote, target))
        moving_and_told = self.ticking(moving, moved(number))
        if late:
            return [*entering, *moving_and_told, self.wait(lent, late)]
        self.pending += lent
        return [*entering, *moving_and_told]

    def is_due(self, wait: Pending, steps: Round) -> bool:
        """Whether these steps use its cells, but for stores of the peer's own."""
        by_others = tuple(s for s in steps if self.flow.storer(self.rank, s) != wait.rank)
        used = self.flow.writes(self.rank, by_others)
        if not wait.reading:
            used |= self.flow.reads(self.rank, steps)
        return bool(wait.cells & used)

    def view(self, rank: int, chunk: Chunk) -> Items:
        return self.buffers[rank][chunk.buffer][self.layout.items(chunk)]

    def copy(self, target: Items, source: Items) -> Action:
        return partial(self.memory.copy, target, source)

    def ticking(self, bound: BoundRound, count: int) -> list[BoundRound]:
        """``bound``, and then this rank says how far it has come: what it has queued so far must
        have been done."""
        tick = self.node.tick(self.slot, count)
        if self.gate is None:
            self.add(bound, [], tick)
            return [bound]
        rounds = behind(self.gate, bound)
        self.add(rounds[-1], [], tick)
        return rounds

    def flags(self, rank: int, count: int) -> list[Flag]:
        """The condition that ``rank`` has reached ``count``, unless an earlier one implies it."""
        if count <= self.reached[rank]:
            return []
        self.reached[rank] = count
        return [self.node.flag(rank, self.slot, count)]

    def wait(self, pending: Iterable[Pending], then: list[Action]) -> BoundRound:
        latest: dict[int, int] = {}
        for one in pending:
            latest[one.rank] = max(one.until, latest.get(one.rank, 0))
        flags = [flag for rank, until in latest.items() for flag in self.flags(rank, until)]
        return BoundRound(
            requests=list(flags), finish=[*(flag.Wait for flag in flags), *then], reductions=then
        )

    @staticmethod
    def add(bound: BoundRound, flags: list[Flag], *actions: Action) -> None:
        bound.requests += flags
        bound.finish += [*(flag.Wait for flag in flags), *actions]
        bound.reductions += actions

    def reduction(self, step: RecvReduce, arrived: Items, target: Items) -> Action:
        if self.combine is None:
            raise ScheduleError(f"{step} reduces, but no operation was given")
        own = self.view(self.rank, step.operand or step.chunk)
        operands = (arrived, own) if step.peer < self.rank else (own, arrived)
        return self.memory.reduction(self.combine, *operands, target)
