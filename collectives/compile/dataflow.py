"""Who has to wait for whom when the ranks of a schedule share their memory.

There is no message to wait for, only memory that may be read or stored to from some point on.
Each rank counts what it has done: ``2k+1`` when it enters round k, ``2k+2`` when its own loads and
stores of round k are done.  From the data flow of all ranks follows which count of which rank a
load or a store needs, and most of the waiting falls away: a send buffer may be read as soon as its
owner has entered, a chunk that its owner has not used yet may be stored to, and what a rank itself
has done in another's memory, it need not be told.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from collectives.algorithms.segments import first_segment
from collectives.compile.replay import Begin, Message, replay
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send, Step

#: A chunk of a buffer; in place, a chunk of ``sendbuf`` is that of ``recvbuf`` where it lies.
Cell = tuple[str, int]
#: By ranks, the first round of something.
_Firsts = dict[int, int]


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
    """The loads and stores of all ranks, by rounds and cells.

    Segments that run one after the other share no cell, so the first one says it for all: in the
    next one, rounds are ``period`` and chunks ``stride`` further on.

    Attributes:
        schedule: the first segment.
        segments: number of segments.
        programs: the rounds of each rank in the first segment.
        ends: the other end of each end of a message.
        period: largest number of rounds of a rank in a segment.
        stride: chunks from a segment to the next one.
        rounds: largest number of rounds of a rank.
    """

    def __init__(self, schedule: Schedule, in_place: bool, segments: int = 1) -> None:
        """``schedule`` is aligned.  Cost: one step of Python for each chunk that a step names, on
        all ranks, however many segments there are."""
        self.stride = schedule.chunks
        self.schedule = schedule = first_segment(schedule, segments)
        self.segments = segments
        self.in_place = in_place
        self.programs = [list(schedule.rounds(rank)) for rank in range(schedule.size)]
        self.period = max(map(len, self.programs))
        self.rounds = self.period * segments
        self.ends = dict(_ends(schedule))
        #: For each rank's cells: the first round in which each rank uses them, or stores to them.
        self._used: list[dict[Cell, _Firsts]] = [defaultdict(dict) for _ in self.programs]
        self._stored: list[dict[Cell, _Firsts]] = [defaultdict(dict) for _ in self.programs]
        for rank, program in enumerate(self.programs):
            for number, steps in enumerate(program):
                for position, step in enumerate(steps):
                    by = self.mover(Endpoint(rank, number, position))
                    written = self.writes(rank, (step,))
                    for cell in written:
                        self._stored[rank][cell].setdefault(by, number)
                    for cell in written | self.reads(rank, (step,)):
                        self._used[rank][cell].setdefault(by, number)

        self._awaited: list[set[int]] = [set() for _ in self.programs]
        for end in self.ends:
            if self.mover(end) != end.rank:
                self._awaited[end.rank].add(self.available(end))

    def is_awaited(self, rank: int, since: int, until: int) -> bool:
        """Whether others may wait for a count of ``rank`` above ``since``, up to ``until``."""
        return any(since < count <= until for count in self._awaited[rank])

    def at(self, chunk: Chunk, segment: int) -> Chunk:
        """The chunk of another segment that has the place of ``chunk`` in the first one."""
        further = segment * self.stride
        return Chunk(chunk.buffer, chunk.start + further, chunk.stop + further)

    def step(self, end: Endpoint) -> Step:
        """The step at ``end``."""
        return self.programs[end.rank][end.round][end.position]

    def mover(self, end: Endpoint) -> int:
        """The rank that does the loads and stores of a step."""
        step = self.step(end)
        if isinstance(step, Copy):
            return end.rank
        other = self.ends[end]
        sender, receiver = (end, other) if isinstance(step, Send) else (other, end)
        loads = isinstance(self.step(receiver), RecvReduce)
        return receiver.rank if loads else sender.rank

    def cells(self, rank: int, chunk: Chunk) -> frozenset[Cell]:
        """The cells of ``chunk`` on ``rank``."""
        buffer, offset = chunk.buffer, 0
        if self.in_place and buffer == "sendbuf":
            place = self.schedule.contract.place(self.schedule.member(rank))
            if place is not None:
                buffer, offset = "recvbuf", place
        return frozenset((buffer, i + offset) for i in range(chunk.start, chunk.stop))

    def reads(self, rank: int, steps: Round) -> frozenset[Cell]:
        """The cells of ``rank`` that it or a peer reads in a round."""
        return frozenset(
            cell for step in steps for chunk in read_by(step) for cell in self.cells(rank, chunk)
        )

    def writes(self, rank: int, steps: Round) -> frozenset[Cell]:
        """The cells of ``rank`` that it or a peer stores to in a round."""
        written = (step.chunk for step in steps if not isinstance(step, Send))
        return frozenset(cell for chunk in written for cell in self.cells(rank, chunk))

    def storer(self, rank: int, step: Step) -> int:
        """The rank that stores to the memory of ``rank`` in one of its steps."""
        return step.peer if isinstance(step, Recv) else rank

    def available(self, end: Endpoint) -> int:
        """The count of ``end.rank`` from which its peer may load or store the chunk there."""
        step = self.step(end)
        assert not isinstance(step, Copy), "it has no peer"
        before = (self._stored if isinstance(step, Send) else self._used)[end.rank]
        used_before = any(
            first < end.round
            for cell in self.cells(end.rank, step.chunk)
            for by, first in before.get(cell, {}).items()
            if by != step.peer
        )
        return entered(end.round if used_before else 0)


def read_by(step: object) -> Iterator[Chunk]:
    """The chunk that a step reads, if it reads one of its rank's."""
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
