"""Intermediate representation of a collective: each rank's rounds of steps, of four kinds.

An algorithm is a generator ``def ring(rank, size) -> Iterator[Round]``.  It names *chunks of
buffers*, never addresses or byte counts, so that the same object can be verified, costed, drawn
and run, and so that count 0, count < size and uneven chunks need no special case.

The meaning of a round, which every consumer of a schedule implements:

1. ``Send`` and ``Copy`` read the state in which the round began; they and the receives are all in
   flight together, and the round ends when all of them have completed.
2. ``RecvReduce`` steps are applied after that, in the order in which they are listed.
3. A chunk that is written by a ``Recv`` or ``Copy`` appears nowhere else in its round.

An empty round is free.  Generators use it to keep the two ends of a message in rounds of the same
number, which makes a schedule free of deadlock by construction.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from collectives.contracts import Contract, Member, contract


class Chunk(NamedTuple):
    """The chunks ``start <= i < stop`` of a buffer; they are adjacent in memory."""

    buffer: str
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        last = "" if self.stop == self.start + 1 else f":{self.stop}"
        return f"{self.buffer[0]}{self.start}{last}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer's name; indexing it gives a :class:`Chunk`: ``recvbuf[3]``, ``recvbuf[2:4]``."""

    name: str

    def __getitem__(self, index: int | slice) -> Chunk:
        # Half of the time of generating a schedule is spent here, so not by Chunk's own __new__.
        if isinstance(index, slice):
            return tuple.__new__(Chunk, (self.name, index.start, index.stop))
        return tuple.__new__(Chunk, (self.name, index, index + 1))


#: The caller's send buffer, never written to.  In place, it is memory of ``recvbuf``.
sendbuf = Buffer("sendbuf")
#: The caller's receive buffer.
recvbuf = Buffer("recvbuf")
#: Memory of the schedule's own; its chunk ``i`` is as large as chunk ``i mod chunks`` of a block.
workspace = Buffer("workspace")


class Send(NamedTuple):
    """Send ``chunk`` to rank ``peer``."""

    peer: int
    chunk: Chunk

    def __str__(self) -> str:
        return f"{self.chunk}>{self.peer}"


class Recv(NamedTuple):
    """Receive from rank ``peer`` into ``chunk``."""

    peer: int
    chunk: Chunk

    def __str__(self) -> str:
        return f"{self.chunk}<{self.peer}"


class RecvReduce(NamedTuple):
    """``chunk = operand (op) received``, with the lower rank's value on the left.

    ``operand`` is ``chunk`` itself when left out.  Naming ``sendbuf`` there saves the copy of the
    send buffer with which an out-of-place reduction would otherwise begin.
    """

    peer: int
    chunk: Chunk
    operand: Chunk | None = None

    def __str__(self) -> str:
        operand = f"={self.operand}" if self.operand else ""
        return f"{self.chunk}{operand}+<{self.peer}"


class Copy(NamedTuple):
    """Copy ``source`` to ``chunk`` within this rank."""

    chunk: Chunk
    source: Chunk

    def __str__(self) -> str:
        return f"{self.chunk}={self.source}"


Step = Send | Recv | RecvReduce | Copy
Round = tuple[Step, ...]


def mapped(
    step: Step, chunks: Callable[[Chunk], Iterable[Chunk]], peer: Callable[[int], int]
) -> Iterator[Step]:
    """``step`` with its chunk and peer replaced: one step for each chunk that ``chunks`` returns.

    A copy of a chunk to itself is left out.
    """
    match step:
        case Send(other, chunk):
            for c in chunks(chunk):
                yield Send(peer(other), c)
        case Recv(other, chunk):
            for c in chunks(chunk):
                yield Recv(peer(other), c)
        case RecvReduce(other, chunk, operand):
            for c, o in zip(chunks(chunk), chunks(operand or chunk), strict=True):
                yield RecvReduce(peer(other), c, None if o == c else o)
        case Copy(chunk, source):
            for c, s in zip(chunks(chunk), chunks(source), strict=True):
                if c != s:
                    yield Copy(c, s)


@dataclass(frozen=True)
class Schedule:
    """An algorithm at a number of ranks; the rounds of each rank are generated lazily.

    Attributes:
        collective: name of the contract that it fulfils (``"allreduce"``, ``"allgather"``, ...).
        algorithm: the algorithm's name with its options, as the registry spells it.
        size: number of ranks.
        chunks: pieces into which each block of the buffers is cut.
        workspace: chunks of ``workspace`` that each rank needs.
        in_place: whether ``sendbuf`` may lie in ``recvbuf``; if not, it is copied aside first.
        generate: ``generate(rank)`` iterates over that rank's rounds in O(its own rounds).
        root: root of a broadcast, reduce, gather or scatter.
        aligned: both ends of every message lie in rounds of the same number, as in all schedules of
            the package.  Waits for a whole round of a peer and overlapping segments need it;
            messages do not, as they may be late.
    """

    collective: str
    algorithm: str
    size: int
    chunks: int
    workspace: int
    in_place: bool
    generate: Callable[[int], Iterator[Round]]
    root: int = 0
    aligned: bool = True

    @property
    def contract(self) -> Contract:
        """The contract of its collective."""
        return contract(self.collective)

    def member(self, rank: int) -> Member:
        """``rank`` as the contract sees it."""
        return Member(rank, self.size, self.root, self.chunks)

    def limits(self, rank: int) -> dict[str, int]:
        """Chunks of each buffer that ``rank`` has."""
        member = self.member(rank)
        return {
            "sendbuf": self.contract.send_blocks(member) * self.chunks,
            "recvbuf": self.contract.recv_blocks(member) * self.chunks,
            "workspace": self.workspace,
        }

    def rounds(self, rank: int) -> Iterator[Round]:
        """Rounds of ``rank``; raises ``ValueError`` for a rank outside ``0 <= rank < size``."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not one of the schedule's {self.size} ranks")
        return self.generate(rank)

    def __str__(self) -> str:
        return f"{self.collective} {self.algorithm} on {self.size} ranks"
