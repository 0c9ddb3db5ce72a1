"""A rank's rounds through slots of the node's memory: for ordinary arrays.

The buffers are cut into pieces, which run one after the other, so that a message of a piece fits
into a slot: ``Send`` is a copy into it, ``Recv`` a copy out of it, and ``RecvReduce`` reads its
operand there.  All steps from one rank to another in a round are one message.  Pieces of one length
share their calls, which find their memory by the number of the piece.

Messages to other nodes are the transport's, and on their way while the ranks use their slots: of a
schedule in segments, some are on the wire while others are reduced in the node.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from collectives.compile.dataflow import entered, moved
from collectives.errors import ScheduleError
from collectives.execution.memory import HOST, Combine, Items
from collectives.execution.messages import Layout, Operands, Prepared, Turns, prepared
from collectives.execution.pieces import (
    ExpectLabel,
    Label,
    LoadPiece,
    OnPiece,
    PieceMessage,
    Pieces,
    ReducePiece,
    StorePiece,
    SwapSlots,
    Views,
)
from collectives.execution.plan import Action, Binding, BoundRound, Plan
from collectives.execution.transport.flags import all_reached
from collectives.execution.transport.slots import SLOT_BYTES, InLine, SlotPair, Slots
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send

#: Steps of a message begin with cache lines.
_LINE = 64
#: A part's places in both slots, and its own memory.
Part = tuple[tuple[Items, Items], Views]


class Extent(NamedTuple):
    """Rounds of the longest program, and chunks of the largest message; the same on all ranks."""

    rounds: int
    chunks: int


def bind_slots(
    schedule: Schedule,
    slots: Slots,
    operands: Operands,
    combine: Combine | None,
    binding: Binding,
    extent: Extent,
    call: str,
    wide: "np.dtype[Any] | None" = None,
) -> Plan:
    """A plan for a ``schedule`` that :func:`fits_slots`, of equal blocks, on arrays of the host.

    Args:
        extent: :func:`extent_of` all ranks.
        call: what must be the same on all ranks; messages carry its checksum.
        wide: the type in which items travel and are reduced; the buffers' own by default.
    """
    ready = prepared(schedule, slots.rank, operands, HOST)
    combine = combine and HOST.combine(combine)
    bound = SlotBinder(schedule, slots, ready, combine, wide, binding, extent, call)
    place = InLine(slots.line)
    # First of all, as the ranks start their plans in one order, and go on with them in any.
    first = BoundRound(starts=[place.Start], requests=[place], finish=[place.Wait])
    rounds = [first, *ready.around(bound.rounds(place), operands.after)]
    collective, algorithm = schedule.collective, schedule.algorithm
    plan = Plan(collective, algorithm, ready.nbytes, rounds, all_reached, binding)
    copied = ready.nbytes if ready.before or operands.after else 0
    rooms = *bound.rooms.values(), *bound.arrivals.values()
    plan.own_nbytes = copied + sum(room.nbytes for room in rooms)
    place.plan = weakref.ref(plan)
    return plan


def fits_slots(schedule: Schedule, itemsize: int) -> bool:
    """Whether its messages fit into slots, and both ends of each are in rounds of one number."""
    chunks = max(schedule.limits(schedule.root).values(), default=1)
    return schedule.aligned and chunks * (itemsize + _LINE) <= SLOT_BYTES


class SlotBinder:
    """Turns one rank's rounds into calls.

    Attributes:
        count, room: items of a block of the buffers, and of a piece.
        rooms: memory of one piece, which all pieces use, in the place of a buffer.
        arrivals: memory in which messages of other nodes wait to be reduced.
    """

    def __init__(
        self,
        schedule: Schedule,
        slots: Slots,
        ready: Prepared,
        combine: Combine | None,
        wide: "np.dtype[Any] | None",
        binding: Binding,
        extent: Extent,
        call: str,
    ) -> None:
        self.call, self.label = call, crc32(call.encode())
        self.slots, self.node, self.rank, self.combine = slots, slots.node, slots.rank, combine
        self.counters, self.pairs = slots.counters, slots.pairs
        self.turns = Turns(binding.tags)
        self.traffic = binding.progress.traffic
        self.arrivals: dict[tuple[int, int, int], Items] = {}
        self.program = list(schedule.rounds(self.rank))
        self.chunks = schedule.chunks
        self.extent = extent
        self.buffers = ready.buffers
        self.dtype = wide or ready.dtype
        self.blocks = {name: len(layout.starts) - 1 for name, layout in ready.layouts.items()}
        known = (ready.layouts[name].starts for name in ("recvbuf", "sendbuf") if self.blocks[name])
        self.count = next(known, (0, 0))[1]
        self.room = self._longest()
        self.rooms = {
            name: HOST.empty(self.room * self.blocks[name], self.dtype)
            for name in (self.blocks if wide else ("workspace",))
        }
        self.receives = schedule.contract.result(schedule.member(self.rank), 0) is not None

    def _longest(self) -> int:
        """Items of each block in a piece: as many as let all messages fit into a slot, or fewer,
        so that pieces are equal."""
        nbytes = SLOT_BYTES // self.extent.chunks // _LINE * _LINE
        longest = self.chunks * (nbytes // self.dtype.itemsize)
        number = max(1, -(-self.count // longest))
        unit = self.chunks * max(1, _LINE // self.dtype.itemsize)
        return min(longest, -(-self.count // number // unit) * unit)

    def rounds(self, place: InLine) -> list[BoundRound]:
        """The rounds of all pieces, at whose end the run leaves its ``place`` in the line."""
        bound: list[BoundRound] = []
        end = self.count // self.room * self.room if self.room else 0
        for pieces in (
            Pieces(self.room, range(0, end, self.room or 1)),
            Pieces(self.count - end, range(end, self.count, self.room or 1)),
        ):
            if pieces.starts:
                bound += self.rounds_of_pieces(pieces) * len(pieces.starts)
                # Others may wait for it, where no later count says that this rank has read all.
                done = self.node.tick(self.counters, moved(self.extent.rounds))
                bound.append(BoundRound(starts=[done]))
        return [*bound, BoundRound(starts=[place.leave])]

    def rounds_of_pieces(self, pieces: Pieces) -> list[BoundRound]:
        """The rounds of each of these pieces, whose counts are those of a run of its own."""
        first = [self.node.advance(self.counters, moved(self.extent.rounds) + 1)]
        bound = [BoundRound(starts=[*first, *self.converted("sendbuf", pieces)])]
        for number, steps in enumerate(self.program):
            bound += self.rounds_of_step(number, pieces, steps)
        back = self.converted("recvbuf", pieces) if self.receives else []
        return [*bound, BoundRound(starts=[*back, pieces.advance])]

    def converted(self, name: str, pieces: Pieces) -> list[Action]:
        """The conversions of a piece: of what is sent before it runs, of the result afterwards."""
        if name not in self.rooms:
            return []
        whole = Chunk(name, 0, self.blocks[name] * self.chunks)
        pairs = zip(self.views(whole, pieces), self.views(whole, pieces, outside=True))
        order = -1 if name == "recvbuf" else 1
        return [OnPiece(pieces, HOST.convert, pair[::order]) for pair in pairs]

    def rounds_of_step(self, number: int, pieces: Pieces, steps: Round) -> list[BoundRound]:
        """Round ``number`` of the schedule for these pieces, as up to three."""
        entering, moving, landing = BoundRound(), BoundRound(), BoundRound()
        reducing = landing if self.is_crossed(steps, pieces) else moving
        sent: dict[int, int] = {}  # bytes of a slot, by peer
        got: dict[int, int] = {}
        messages = leaving = 0
        for step in steps:
            own = self.views(step.chunk, pieces)
            if not (nbytes := sum(views[0].nbytes for views in own)):
                continue
            if isinstance(step, Copy):
                moving.starts += _copies(pieces, own, self.views(step.source, pieces))
                continue
            if isinstance(step, Send):
                leaving += nbytes
                messages += step.peer not in sent
            if step.peer not in self.pairs:
                self.message(step, pieces, landing)
                continue
            peer, pair = step.peer, self.pairs[step.peer]
            total = sent if isinstance(step, Send) else got
            start = total.get(peer, 0)
            parts = [*zip(_in_slots(pair, start, own), own)]
            if isinstance(step, Send):
                if peer not in sent:
                    entering.add([self.slots.flag(peer, 0, pair)])
                    moving.starts.append(Label(pair, self.label))
                moving.starts += [StorePiece(pieces, pair, *part) for part in parts]
            else:
                if peer not in got:
                    moving.add([self.slots.flag(peer, entered(number))])
                    reducing.add([], ExpectLabel(pair, self.label, peer, self.call))
                reducing.add([], *self.reads(step, pieces, parts, pair))
            total[peer] = start + -(-nbytes // _LINE) * _LINE
        if self.traffic is not None and messages:
            moving.starts.append(partial(self.traffic.send, messages, leaving))
        if sent:
            moving.starts.append(self.node.tick(self.counters, entered(number)))
        runs = self.node.runs[self.counters]
        for peer in {**sent, **got}:
            swap = SwapSlots(self.pairs[peer], runs, moved(number), peer in sent, peer in got)
            reducing.add([], swap)
        if got and not self.sends((number + 1) % self.extent.rounds, pieces):
            # Else the next count says that this rank has read its messages.
            reducing.add([], self.node.tick(self.counters, moved(number)))
        entering.starts = [one.Start for one in landing.requests]
        landing.finish = [*(one.Wait for one in landing.requests), *landing.reductions]
        return [each for each in (entering, moving, landing) if each.starts or each.finish]

    def is_crossed(self, steps: Round, pieces: Pieces) -> bool:
        """Whether this rank reduces in a round what it exchanges with another node there, so that
        the steps must keep their order."""

        def first(step: Send | Recv | RecvReduce) -> Iterator[Items]:
            for chunk in (step.chunk, getattr(step, "operand", None) or step.chunk):
                yield from (views[0] for views in self.views(chunk, pieces))

        messages = [step for step in steps if not isinstance(step, Copy)]
        far = [one for step in messages if step.peer not in self.pairs for one in first(step)]
        near = [s for s in messages if s.peer in self.pairs and isinstance(s, RecvReduce)]
        return any(np.may_share_memory(*pair) for s in near for pair in product(first(s), far))

    def message(self, step: Send | Recv | RecvReduce, pieces: Pieces, landing: BoundRound) -> None:
        """Adds a message to or from another node."""
        transport = self.slots.transport
        assert transport is not None, "other ranks are on this node"
        init = transport.send_init if isinstance(step, Send) else transport.recv_init
        ends = own = self.views(step.chunk, pieces)
        if isinstance(step, RecvReduce):
            keys = [(len(landing.requests), n, views[0].size) for n, views in enumerate(own)]
            for new in {*keys} - self.arrivals.keys():
                self.arrivals[new] = HOST.empty(new[-1], self.dtype)
            rooms = [self.arrivals[key] for key in keys]
            pair = SlotPair((rooms[0], rooms[0]), 0)  # which nobody swaps
            landing.reductions += self.reads(step, pieces, [*zip(zip(rooms, rooms), own)], pair)
            ends = [[room] * len(pieces.starts) for room in rooms]
        for views in ends:
            if views[0].size:
                tag = self.turns.tag(step)
                requests = [init(items.view(np.uint8), step.peer, tag) for items in views]
                landing.requests.append(PieceMessage(pieces, requests, transport.testall))

    def reads(
        self, step: Recv | RecvReduce, pieces: Pieces, parts: list[Part], pair: SlotPair
    ) -> Iterator[Action]:
        """The calls that put what has arrived into the memory of a step."""
        if isinstance(step, Recv):
            yield from (LoadPiece(pieces, pair, *part) for part in parts)
            return
        if self.combine is None:
            raise ScheduleError(f"{step} reduces, but no operation was given")
        operands = self.views(step.operand or step.chunk, pieces)
        for part, operand in zip(parts, operands, strict=True):
            yield ReducePiece(pieces, pair, *part, operand, self.combine, step.peer < self.rank)

    def sends(self, number: int, pieces: Pieces) -> bool:
        """Whether this rank sends something through slots in a round of these pieces."""
        steps = self.program[number] if number < len(self.program) else ()
        near = self.pairs
        sent = (step.chunk for step in steps if isinstance(step, Send) and step.peer in near)
        return any(views[0].size for chunk in sent for views in self.views(chunk, pieces))

    def views(self, chunk: Chunk, pieces: Pieces, outside: bool = False) -> list[Views]:
        """The memory of a chunk in each of the pieces, for each block that it lies in.

        Args:
            outside: whether it is the caller's memory, also where a room stands in its place.
        """
        room, chunks = None if outside else self.rooms.get(chunk.buffer), self.chunks
        within, found = Layout.even(pieces.length, 1, chunks), []
        for block in range(chunk.start // chunks, -(-chunk.stop // chunks)):
            first = block * chunks
            start = within.offset(max(chunk.start - first, 0))
            stop = within.offset(min(chunk.stop - first, chunks))
            if room is not None:
                begin = block * self.room
                found.append([room[begin + start : begin + stop]] * len(pieces.starts))
                continue
            memory, begin = self.buffers[chunk.buffer], block * self.count
            ends = ((begin + at + start, begin + at + stop) for at in pieces.starts)
            found.append([memory[one:other] for one, other in ends])
        return found


def extent_of(schedule: Schedule, ranks: Iterable[int]) -> Extent:
    """Rounds of the longest program of these ranks, and chunks of their largest message."""
    period = most = 1
    for rank in ranks:
        for number, steps in enumerate(schedule.rounds(rank)):
            sent: dict[int, int] = defaultdict(int)
            for step in steps:
                if isinstance(step, Send):
                    sent[step.peer] += step.chunk.length
            period, most = max(period, number + 1), max(most, *sent.values(), 0)
    return Extent(period, most)


def _in_slots(pair: SlotPair, start: int, own: Sequence[Views]) -> Iterator[tuple[Items, Items]]:
    """The places of a message's parts in both slots."""
    one, other = pair.slots
    for views in own:
        stop = start + views[0].nbytes
        yield one[start:stop].view(views[0].dtype), other[start:stop].view(views[0].dtype)
        start = stop


def _copies(pieces: Pieces, targets: list[Views], sources: list[Views]) -> Iterator[Action]:
    """Copies of what does not lie there already, as a block does in place."""
    for pair in zip(targets, sources, strict=True):
        one, other = (HOST.address(views[0]) for views in pair)
        if one != other:
            yield OnPiece(pieces, np.copyto, pair)
