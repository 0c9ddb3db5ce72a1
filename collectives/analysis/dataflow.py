"""Who has to wait for whom when the ranks of a schedule share their memory.

There is no message to wait for, only memory that may be read or stored to from some point on.
Each rank counts what it has done: ``2k+1`` when it enters round k, ``2k+2`` when its own loads and
stores of round k are done.  From the data flow of all ranks follows which count of which rank a
load or a store needs, and most of the waiting falls away: a send buffer may be read as soon as its
owner has entered, and a chunk that its owner has not used yet may be stored to.
"""

from collections.abc import Iterator
from typing import NamedTuple

from collectives.analysis.replay import Begin, Message, replay
from collectives.schedule import Chunk, Copy, RecvReduce, Round, Schedule, Send, Step

#: A chunk of a buffer; in place, a chunk of ``sendbuf`` is that of ``recvbuf`` where it lies.
Cell = tuple[str, int]


class Endpoint(NamedTuple):
    """One end of a message: a step by its place."""

    rank: int
    round: int
    position: int


def entered(number: int) -> int:
    """The count of a rank that has entered round ``number``."""
    return 2 * number + 1


def moved(number: int) -> int:
    """The count of a rank that is done with its own loads and stores of round ``number``."""
    return 2 * number + 2


class Dataflow:
    """What all ranks do, in which round, to which cells.

    Attributes:
        programs: the rounds of each rank.
        ends: for each end of a message, the other.
        rounds: largest number of rounds of a rank.
    """

    def __init__(self, schedule: Schedule, in_place: bool) -> None:
        """Cost: one step of Python for each chunk that a step names, on all ranks."""
        self.schedule = schedule
        self.in_place = in_place
        self.programs = [list(schedule.rounds(rank)) for rank in range(schedule.size)]
        self.rounds = max(map(len, self.programs))
        self.ends = dict(_ends(schedule))
        self._touched: list[dict[Cell, int]] = [{} for _ in self.programs]
        self._written: list[dict[Cell, int]] = [{} for _ in self.programs]
        for rank, program in enumerate(self.programs):
            for number, steps in enumerate(program):
                if not steps:
                    continue
                written = self.writes(rank, steps)
                for cell in written:
                    self._written[rank].setdefault(cell, number)
                for cell in written | self.reads(rank, steps):
                    self._touched[rank].setdefault(cell, number)

        self._awaited: list[set[int]] = [set() for _ in self.programs]
        for end in self.ends:
            self._awaited[end.rank] |= {self.readable(end), self.writable(end)}

    def is_awaited(self, rank: int, since: int, until: int) -> bool:
        """Whether others may wait for a count of ``rank`` above ``since``, up to ``until``."""
        return any(since < count <= until for count in self._awaited[rank])

    def step(self, end: Endpoint) -> Step:
        """The step at ``end``."""
        return self.programs[end.rank][end.round][end.position]

    def cells(self, rank: int, chunk: Chunk) -> frozenset[Cell]:
        """The cells of ``chunk`` on ``rank``."""
        buffer, offset = chunk.buffer, 0
        if self.in_place and buffer == "sendbuf":
            place = self.schedule.contract.place(self.schedule.member(rank))
            if place is not None:
                buffer, offset = "recvbuf", place
        return frozenset((buffer, i + offset) for i in range(chunk.start, chunk.stop))

    def reads(self, rank: int, steps: Round) -> frozenset[Cell]:
        """What ``rank`` itself or a peer reads of its memory in a round."""
        return frozenset(
            cell for step in steps for chunk in _read(step) for cell in self.cells(rank, chunk)
        )

    def writes(self, rank: int, steps: Round) -> frozenset[Cell]:
        """What ``rank`` itself or a peer stores to its memory in a round."""
        written = (step.chunk for step in steps if not isinstance(step, Send))
        return frozenset(cell for chunk in written for cell in self.cells(rank, chunk))

    def readable(self, end: Endpoint) -> int:
        """The count of ``end.rank`` from which the chunk that it sends there may be read."""
        return self._available(end, self._written[end.rank])

    def writable(self, end: Endpoint) -> int:
        """The count of ``end.rank`` from which the chunk that it receives may be stored to."""
        return self._available(end, self._touched[end.rank])

    def _available(self, end: Endpoint, first: dict[Cell, int]) -> int:
        cells = self.cells(end.rank, self.step(end).chunk)
        used_before = any(first.get(cell, end.round) < end.round for cell in cells)
        return entered(end.round if used_before else 0)


def _read(step: Step) -> Iterator[Chunk]:
    match step:
        case Send(_, chunk):
            yield chunk
        case RecvReduce(_, chunk, operand):
            yield operand or chunk
        case Copy(_, source):
            yield source


def _ends(schedule: Schedule) -> Iterator[tuple[Endpoint, Endpoint]]:
    current = [0] * schedule.size
    for event in replay(schedule):
        match event:
            case Begin(rank, number, _):
                current[rank] = number
            case Message(sender, sent, receiver, received):
                source = Endpoint(sender, current[sender], sent)
                target = Endpoint(receiver, current[receiver], received)
                yield source, target
                yield target, source
