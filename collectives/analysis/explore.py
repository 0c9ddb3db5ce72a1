"""Recorder of a schedule for a page that steps through it: each cell's value after each round.

The values are the verifier's: the schedule is proved, and the writes of the proof are recorded.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from collectives.analysis.expression import Arrival, Expression
from collectives.analysis.verify import Verifier
from collectives.errors import CollectiveError
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Schedule

#: A page of more ranks has cells too small to see, one of more moves is slow to load.
MOST_RANKS, MOST_MOVES = 64, 60_000
#: Buffers by their number in the data, and the kinds of a move by theirs.
BUFFERS = ("sendbuf", "recvbuf", "workspace")
RECEIVE, REDUCE, COPY = range(3)

#: A step, the values that it writes, and the message that brought them; a copy has none.
Written = tuple[Recv | RecvReduce | Copy, list[Expression], Arrival | None]


class Sum(Expression):
    """An expression that remembers its two operands, in the order in which they are added."""

    operands: tuple[Expression, Expression]


@dataclass
class _Recorder(Verifier):
    """A proof that keeps what each round of each rank writes.

    Attributes:
        written: writes of each rank and round, in the order in which its steps are applied.
        messages: number of messages that have arrived.
    """

    written: dict[tuple[int, int], list[Written]] = field(default_factory=lambda: defaultdict(list))
    messages: int = 0

    def _reduce(
        self, rank: int, number: int, step: RecvReduce, left: Expression, right: Expression
    ) -> Expression:
        reduced = Sum(*super()._reduce(rank, number, step, left, right))
        reduced.operands = (left, right)
        return reduced

    def _write(
        self, rank: int, number: int, step: Recv | RecvReduce | Copy, values: list[Expression]
    ) -> None:
        super()._write(rank, number, step, values)
        self.written[rank, number].append((step, values, self.arrival))
        self.messages += self.arrival is not None
        if self.messages > MOST_MOVES:
            raise CollectiveError(
                f"{self.schedule} sends more than {MOST_MOVES} messages, the most that a page can "
                "hold; take fewer ranks or segments"
            )


@dataclass
class _Nodes:
    """Expressions, each once, numbered.

    Attributes:
        table: a leaf is ``[-1 - rank, chunk of its sendbuf]``, a sum the numbers of its operands.
    """

    table: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    known: dict[int, tuple[Expression, int]] = field(default_factory=dict)

    def number(self, value: Expression) -> int:
        """The number of ``value``; no deeper than there are ranks."""
        if id(value) not in self.known:  # an object stands for one value
            if isinstance(value, Sum):
                left, right = map(self.number, value.operands)
            else:
                left, right = -value.ranks.bit_length(), value.chunk
            number = self.numbers.setdefault((left, right), len(self.table))
            if number == len(self.table):
                self.table.append((left, right))
            self.known[id(value)] = value, number
        return self.known[id(value)][1]


def record(schedule: Schedule, in_place: bool = False) -> dict[str, Any]:
    """Proves ``schedule`` and returns its rounds as data for JSON.

    Buffers go by their number in ``BUFFERS``; a cell is a chunk where it lies in memory.

    Returns:
        ``name``, ``size`` and ``reduces``, whether the collective does; ``cells[buffer][rank]``,
        how many there are; ``nodes``, the expressions (see :class:`_Nodes`); ``start``, what the
        cells hold at first, as ``[rank, buffer, cell, node, is the result]``; and ``rounds``, each
        of them with ``moves``: ``[kind, from, to, source's buffer, source's first cell, target's
        buffer, target's first cell, cells, operand's buffer, operand's first cell, sender's
        round]``, and ``writes``: ``[rank, buffer, cell, node, is the result, number of the move]``.

    Raises:
        CollectiveError: more ranks or messages than a page can show.
        ScheduleError: the schedule is wrong.
    """
    if schedule.size > MOST_RANKS:
        raise CollectiveError(f"a page shows at most {MOST_RANKS} ranks, not {schedule.size}")
    if in_place and not schedule.in_place:
        raise CollectiveError(
            f"{schedule} reads its input late, so that with MPI.IN_PLACE it is copied aside first; "
            "look at it out of place"
        )
    recorder = _Recorder(schedule, in_place)
    recorder.run()
    nodes = _Nodes()
    start = []
    for rank, i, leaf in _leaves(schedule):
        place = _place(recorder, rank, Chunk("sendbuf", i, i + 1))
        start.append([rank, *place, nodes.number(leaf), _is_result(recorder, rank, place, leaf)])
    length = max(sum(1 for _ in schedule.rounds(rank)) for rank in range(schedule.size))
    rounds = [_Round(recorder, nodes) for _ in range(length)]
    for (rank, number), written in sorted(recorder.written.items(), key=lambda item: item[0]):
        for one in written:
            rounds[number].add(rank, *one)
    return {
        "name": schedule.algorithm,
        "size": schedule.size,
        "rounds": [{"moves": r.moves, "writes": r.writes} for r in rounds],
        "reduces": schedule.contract.reduces,
        "cells": [_counts(recorder, buffer) for buffer in BUFFERS],
        "nodes": nodes.table,
        "start": start,
    }


def _leaves(schedule: Schedule) -> list[tuple[int, int, Expression]]:
    """Initial values as (rank, chunk of its ``sendbuf``, value)."""
    return [
        (rank, i, Expression(i, 1 << rank, -1, True))
        for rank in range(schedule.size)
        for i in range(schedule.limits(rank)["sendbuf"])
    ]


def _place(recorder: Verifier, rank: int, chunk: Chunk) -> tuple[int, int]:
    """Number of the buffer and first cell of a chunk, where it lies in memory."""
    buffer, first = recorder.cell(rank, chunk.buffer, chunk.start)
    return BUFFERS.index(buffer), first


def _counts(recorder: Verifier, buffer: str) -> list[int]:
    """Cells of a buffer on each rank; a ``sendbuf`` that lies in ``recvbuf`` has none."""
    lies_elsewhere = [buffer == "sendbuf" and place is not None for place in recorder.places]
    return [0 if gone else limits[buffer] for gone, limits in zip(lies_elsewhere, recorder.limits)]


def _is_result(recorder: Verifier, rank: int, place: tuple[int, int], value: Expression) -> int:
    """1 if a cell is one of ``recvbuf`` that is to end with ``value``, else 0."""
    if place[0] != BUFFERS.index("recvbuf"):
        return 0
    wanted = recorder.contract.result(recorder.members[rank], place[1])
    if wanted is None:
        return 0
    return int((value.chunk, value.ranks) == (wanted.chunk, sum(1 << r for r in wanted.ranks)))


@dataclass
class _Round:
    """The moves and writes of one round, of all ranks."""

    recorder: _Recorder
    nodes: _Nodes
    moves: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)

    def add(
        self,
        rank: int,
        step: Recv | RecvReduce | Copy,
        values: list[Expression],
        arrival: Arrival | None,
    ) -> None:
        """Adds a step that writes ``values``, which ``arrival`` has brought if it is no copy."""
        target = _place(self.recorder, rank, step.chunk)
        kind, operand = RECEIVE, (-1, -1)
        if isinstance(step, Copy):
            kind, sender, number = COPY, rank, -1
            origin = _place(self.recorder, rank, step.source)
            if origin == target:
                return  # in place, the block is there already
        else:
            assert arrival is not None, "a message has brought it"
            sender, number = arrival.sender, arrival.number
            origin = _place(self.recorder, sender, arrival.step.chunk)
            if isinstance(step, RecvReduce):
                kind, operand = REDUCE, _place(self.recorder, rank, step.operand or step.chunk)
        self.moves.append([kind, sender, rank, *origin, *target, len(values), *operand, number])
        for i, value in enumerate(values):
            place = target[0], target[1] + i
            done = _is_result(self.recorder, rank, place, value)
            move = len(self.moves) - 1
            self.writes.append([rank, *place, self.nodes.number(value), done, move])
