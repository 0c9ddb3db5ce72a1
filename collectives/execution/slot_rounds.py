"""A rank's rounds through slots of the node's memory: for ordinary arrays of ranks of one node.

The buffers are cut into pieces, which run one after the other, so that a message of a piece fits
into a slot: ``Send`` is a copy into it, ``Recv`` a copy out of it, and ``RecvReduce`` reads its
operand there.  All steps from one rank to another in a round are one message.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from collectives.compile.dataflow import entered, moved
from collectives.errors import ScheduleError
from collectives.execution.memory import HOST, Combine, Items
from collectives.execution.messages import Layout, Operands, Prepared, prepared
from collectives.execution.plan import Action, Binding, BoundRound, Plan
from collectives.execution.traffic import Traffic
from collectives.execution.transport.flags import Flag, RunCount
from collectives.execution.transport.slots import SLOT_BYTES, InLine, Pair, Slots
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send

#: Steps of a message begin with cache lines.
_LINE = 64


def bind_slots(
    schedule: Schedule,
    slots: Slots,
    operands: Operands,
    combine: Combine | None,
    binding: Binding,
    wide: "np.dtype[Any] | None" = None,
) -> Plan:
    """A plan for a ``schedule`` that :func:`fits_slots`, of equal blocks, on arrays of the host.

    Args:
        wide: the type in which items travel and are reduced; the buffers' own by default.
    """
    ready = prepared(schedule, slots.node.rank, operands, HOST)
    combine, traffic = combine and HOST.combine(combine), binding.progress.traffic
    bound = SlotBinder(schedule, slots, ready, combine, wide, traffic)
    place = InLine(slots.line)
    rounds = bound.rounds(place)
    plan = Plan(
        schedule.collective,
        schedule.algorithm,
        ready.nbytes,
        ready.around(rounds, operands.after),
        _all_reached,
        binding,
    )
    place.plan = weakref.ref(plan)
    return plan


@dataclass(slots=True, eq=False)
class _Turn:
    """An action on the slot whose turn it is: one for each that this rank may store to."""

    pair: Pair
    actions: tuple[Action, Action]

    def __call__(self) -> None:
        self.actions[self.pair.turn]()


@dataclass(slots=True, eq=False)
class _Swap:
    """The end of an exchange, which the peer ends at the count ``until`` of this run."""

    pair: Pair
    runs: RunCount
    until: int
    stores: bool
    reads: bool

    def __call__(self) -> None:
        self.pair.swap(self.runs.base + self.until if self.stores else 0, self.reads)


class SlotBinder:
    """Turns one rank's rounds into calls."""

    def __init__(
        self,
        schedule: Schedule,
        slots: Slots,
        ready: Prepared,
        combine: Combine | None,
        wide: "np.dtype[Any] | None",
        traffic: Traffic | None,
    ) -> None:
        self.node, self.rank, self.combine = slots.node, slots.node.rank, combine
        self.counters, self.pairs = slots.counters, slots.pairs
        self.program = list(schedule.rounds(self.rank))
        self.chunks = schedule.chunks
        self.period, most = _extent(schedule)
        blocks = {name: len(layout.starts) - 1 for name, layout in ready.layouts.items()}
        starts = (ready.layouts[name].starts for name in ("recvbuf", "sendbuf") if blocks[name])
        self.count = next(starts, (0, 0))[1]
        dtype = wide or ready.dtype
        self.pieces = self._pieces(most, dtype.itemsize)
        longest = max((len(piece) for piece in self.pieces), default=0)
        #: Memory of one piece, which all pieces use.
        self.rooms = {
            name: HOST.empty(longest * blocks[name], dtype)
            for name in (blocks if wide else ("workspace",))
        }
        self.buffers = ready.buffers
        self.receives = schedule.contract.result(schedule.member(self.rank), 0) is not None
        self.traffic = traffic

    def _pieces(self, most: int, itemsize: int) -> list[range]:
        """Items of each block in each piece: equal pieces, whose messages of ``most`` chunks fit
        into a slot."""
        nbytes = len(next(iter(self.pairs.values())).slots[0]) // most // _LINE * _LINE
        lines = _LINE // itemsize if _LINE % itemsize == 0 else 1
        longest = self.chunks * (nbytes // itemsize)
        number = -(-self.count // longest)
        unit = self.chunks * lines
        length = -(-self.count // max(number, 1) // unit) * unit
        return [range(i, min(i + length, self.count)) for i in range(0, self.count, length or 1)]

    def rounds(self, place: InLine) -> list[BoundRound]:
        """The rounds of one run, which has its ``place`` among others: those of all pieces."""
        last = self.period * len(self.pieces)
        bound = BoundRound(starts=[place.Start], requests=[place], finish=[place.Wait])
        _do(bound, self.node.advance(self.counters, entered(last)))
        rounds = [bound]
        for index, piece in enumerate(self.pieces):
            rounds.append(BoundRound(starts=self.converted("sendbuf", piece)))
            for number, steps in enumerate(self.program, index * self.period):
                rounds += self.round(number, piece, steps)
            rounds.append(BoundRound(starts=self.converted("recvbuf", piece)))
        rounds.append(BoundRound(starts=[place.leave]))
        return [each for each in rounds if each.starts or each.finish]

    def converted(self, name: str, piece: range) -> list[Action]:
        """The conversions of a piece: of what is sent before it runs, of the result afterwards."""
        room = self.rooms.get(name)
        if room is None or not (name == "sendbuf" or self.receives):
            return []
        actions: list[Action] = []
        for start in range(0, len(room) // len(self.pieces[0])):
            wide = room[start * len(self.pieces[0]) :][: len(piece)]
            own = self.buffers[name][start * self.count + piece.start :][: len(piece)]
            pair = (wide, own) if name == "sendbuf" else (own, wide)
            actions.append(partial(HOST.convert, *pair))
        return actions

    def sends(self, number: int) -> bool:
        """Whether this rank sends something in round ``number`` of the run."""
        index, number = divmod(number, self.period)
        if index >= len(self.pieces) or number >= len(self.program):
            return False
        sent = (step.chunk for step in self.program[number] if isinstance(step, Send))
        return any(view.size for chunk in sent for view in self.views(chunk, self.pieces[index]))

    def round(self, number: int, piece: range, steps: Round) -> list[BoundRound]:
        """Round ``number`` of the run."""
        entering, moving = BoundRound(), BoundRound()
        sent: dict[int, int] = {}  # bytes of a slot, by peer
        got: dict[int, int] = {}
        leaving = 0
        for step in steps:
            own = self.views(step.chunk, piece)
            if not (nbytes := sum(view.nbytes for view in own)):
                continue
            if isinstance(step, Copy):
                moving.starts += _copies(own, self.views(step.source, piece))
                continue
            peer, pair = step.peer, self.pairs[step.peer]
            total = sent if isinstance(step, Send) else got
            start = total.get(peer, 0)
            slots = _in_slots(pair, start, own)
            if isinstance(step, Send):
                leaving += nbytes
                if peer not in sent:
                    _wait(entering, self.node.flag(peer, self.counters, 0, pair))
                for view, slot in zip(own, slots):
                    first, second = (partial(np.copyto, each, view) for each in slot)
                    moving.starts.append(_Turn(pair, (first, second)))
            else:
                if peer not in got:
                    _wait(moving, self.node.flag(peer, self.counters, entered(number)))
                operands = self.views(getattr(step, "operand", None) or step.chunk, piece)
                for view, operand, slot in zip(own, operands, slots, strict=True):
                    read = partial(self.read, step, view, operand)
                    # What the peer stored is in the slot to which this rank stores next.
                    _do(moving, _Turn(pair, (read(slot[1]), read(slot[0]))))
            total[peer] = start + -(-nbytes // _LINE) * _LINE
        if sent:
            if self.traffic is not None:
                moving.starts.append(partial(self.traffic.send, len(sent), leaving))
            moving.starts.append(self.node.tick(self.counters, entered(number)))
        for peer in {**sent, **got}:
            runs = self.node.runs[self.counters]
            _do(moving, _Swap(self.pairs[peer], runs, moved(number), peer in sent, peer in got))
        if got and not self.sends(number + 1):  # else the next count says that it has read them
            _do(moving, self.node.tick(self.counters, moved(number)))
        return [entering, moving] if sent else [moving]

    def read(self, step: Recv | RecvReduce, target: Items, operand: Items, slot: Items) -> Action:
        """The call that puts what arrived in ``slot`` into ``target``."""
        if isinstance(step, Recv):
            return partial(np.copyto, target, slot)
        if self.combine is None:
            raise ScheduleError(f"{step} reduces, but no operation was given")
        operands = (slot, operand) if step.peer < self.rank else (operand, slot)
        return HOST.reduction(self.combine, *operands, target)

    def views(self, chunk: Chunk, piece: range) -> list[Items]:
        """The memory of a chunk in a piece: a view for each block that it lies in."""
        room, chunks = self.rooms.get(chunk.buffer), self.chunks
        memory = self.buffers[chunk.buffer] if room is None else room
        within = Layout.even(len(piece), 1, chunks)
        views = []
        for block in range(chunk.start // chunks, -(-chunk.stop // chunks)):
            first = block * chunks
            start = within.offset(max(chunk.start - first, 0))
            stop = within.offset(min(chunk.stop - first, chunks))
            begin = block * self.count + piece.start
            if room is not None:
                begin = block * len(self.pieces[0])
            views.append(memory[begin + start : begin + stop])
        return views


def fits_slots(schedule: Schedule, itemsize: int) -> bool:
    """Whether its messages fit into slots, and both ends of each are in rounds of one number."""
    chunks = max(schedule.limits(schedule.root).values(), default=1)
    return schedule.aligned and chunks * (itemsize + _LINE) <= SLOT_BYTES


def _extent(schedule: Schedule) -> tuple[int, int]:
    """Rounds of the longest program, and chunks of the largest message."""
    period = most = 1
    for rank in range(schedule.size):
        for number, steps in enumerate(schedule.rounds(rank)):
            sent: dict[int, int] = defaultdict(int)
            for step in steps:
                if isinstance(step, Send):
                    sent[step.peer] += step.chunk.length
            period, most = max(period, number + 1), max(most, *sent.values(), 0)
    return period, most


def _in_slots(pair: Pair, start: int, own: Sequence[Items]) -> Iterator[tuple[Items, Items]]:
    """The places of a message's parts in both slots."""
    one, other = pair.slots
    for view in own:
        part, start = slice(start, start + view.nbytes), start + view.nbytes
        yield one[part].view(view.dtype), other[part].view(view.dtype)


def _copies(targets: Sequence[Items], sources: Sequence[Items]) -> Iterator[Action]:
    """Copies of what does not lie there already, as a block does in place."""
    for target, source in zip(targets, sources, strict=True):
        if HOST.address(target) != HOST.address(source):
            yield partial(np.copyto, target, source)


def _wait(bound: BoundRound, flag: Flag) -> None:
    bound.requests.append(flag)
    bound.finish.append(flag.Wait)


def _do(bound: BoundRound, action: Action) -> None:
    bound.finish.append(action)
    bound.reductions.append(action)


def _all_reached(flags: Sequence[Flag]) -> bool:
    return all(flag.Test() for flag in flags)
