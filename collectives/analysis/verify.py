"""Verifier of schedules: replays all ranks symbolically and compares the results to the contract.

The value of a chunk is the *expression tree* of its reduction, not a set of contributions.  So the
proof says: every message is matched and nobody waits for ever, no chunk is used while it is being
written, every contribution enters exactly once, and every rank ends with the same tree (up to
commuting two operands), which makes replicas bit-identical in floating point.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from collectives.analysis.expression import (
    Arrival,
    Expression,
    malformed,
    members,
    spelled,
)
from collectives.analysis.grid import grid
from collectives.compile.dataflow import read_by
from collectives.compile.replay import Begin, End, Message, replay
from collectives.errors import ScheduleError
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send

#: Ranks up to which a complaint shows the grid, and the order of operands.
_READABLE = 9


class Proof(NamedTuple):
    """Properties of a schedule that the verifier has proved.

    Attributes:
        messages: messages in all.
        keeps_order: every reduction is in rank order, as non-commutative operations need.
        uneven: each value stays in places of its own block's length, so blocks may differ in
            length, as in a v-variant.
        roundings: most additions on the way of a contribution to the result; a contribution is
            rounded this often where every partial sum is rounded, as in 16 bits.
    """

    messages: int
    keeps_order: bool
    uneven: bool
    roundings: int


def verify(schedule: Schedule, in_place: bool = False) -> Proof:
    """Proves ``schedule``, with ``sendbuf`` lying in ``recvbuf`` if ``in_place``.

    Cost: one step of Python for each chunk that a step names, on all ranks.

    Raises:
        ScheduleError: with the reason, the rank, round and step, and for a small schedule the grid
            of all ranks and rounds.
    """
    try:
        return prove(schedule, in_place)
    except ScheduleError as error:
        picture = f"\n{grid(schedule)}" if schedule.size <= _READABLE else ""
        raise ScheduleError(f"{error}{picture}") from None


def prove(schedule: Schedule, in_place: bool = False) -> Proof:
    """As :func:`verify`, with no picture in the error."""
    try:
        return Verifier(schedule, in_place).run()
    except (AttributeError, KeyError, TypeError):
        if why := malformed(schedule):
            raise ScheduleError(why) from None
        raise


Cell = tuple[str, int]


@dataclass
class Verifier:
    """One proof; a subclass may observe what it writes."""

    schedule: Schedule
    in_place: bool
    memory: list[dict[Cell, Expression]] = field(default_factory=list)
    trees: dict[tuple[int, int], int] = field(default_factory=dict)
    results: dict[tuple[int, int], tuple[int, Expression]] = field(default_factory=dict)
    uneven: bool = True
    arrived: dict[tuple[int, int], Arrival] = field(default_factory=dict)
    departed: dict[tuple[int, int], list[Expression]] = field(default_factory=dict)
    arrival: Arrival | None = None  # the message that is being applied; none for a copy
    #: The round and step that wrote a rank's cell last, and the message that it came by.
    wrote: dict[tuple[int, Cell], tuple[int, object, Arrival | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.contract = schedule.contract
        self.members = [schedule.member(rank) for rank in range(schedule.size)]
        self.limits = [schedule.limits(rank) for rank in range(schedule.size)]
        self.places = [self.contract.place(m) if self.in_place else None for m in self.members]

    def run(self) -> Proof:
        size = self.schedule.size
        self.uneven = self.contract.block is not None
        for rank in range(size):
            self.memory.append({})
            for i in range(self.limits[rank]["sendbuf"]):
                leaf = Expression(i, 1 << rank, self._tree(-1 - rank, -1 - i), True)
                self.memory[rank][self.cell(rank, "sendbuf", i)] = leaf
        messages = 0
        current: list[tuple[int, Round]] = [(-1, ())] * size
        for event in replay(self.schedule):
            match event:
                case Begin(rank, number, steps):
                    self._check_round(rank, number, steps)
                    current[rank] = (number, steps)
                    for position, step in enumerate(steps):
                        if isinstance(step, Send | Copy):
                            source = step.chunk if isinstance(step, Send) else step.source
                            values = self._read(rank, number, step, source)
                            self.departed[rank, position] = values
                case Message(sender, sent, receiver, received):
                    messages += 1
                    at, steps = current[sender]
                    values = self.departed[sender, sent]
                    self.arrived[receiver, received] = Arrival(sender, at, steps[sent], values)
                case End(rank, number, steps):
                    self._apply(rank, number, steps)
        ordered = [self._check_result(rank) for rank in range(size)]
        return Proof(messages, all(ordered), self.uneven, self._roundings())

    def _roundings(self) -> int:
        """The depth of the deepest tree in the results."""
        depths: list[int] = []  # a tree is numbered after its parts
        for left, right in self.trees:
            depths.append(0 if left < 0 else 1 + max(depths[left], depths[right]))
        return max((depths[value.tree] for _, value in self.results.values()), default=0)

    def cell(self, rank: int, buffer: str, i: int) -> Cell:
        """Where chunk ``i`` of a buffer lies in memory."""
        place = self.places[rank]
        if place is not None and buffer == "sendbuf":
            return "recvbuf", i + place
        return buffer, i

    def _cells(self, rank: int, chunk: Chunk) -> list[Cell]:
        return [self.cell(rank, chunk.buffer, i) for i in range(chunk.start, chunk.stop)]

    def _tree(self, left: int, right: int) -> int:
        """Hash-consing: one number for a pair of subtrees, whichever comes first."""
        return self.trees.setdefault((min(left, right), max(left, right)), len(self.trees))

    def _fail(self, rank: int, number: int, step: object, reason: str) -> ScheduleError:
        return ScheduleError(
            f"{self.schedule}{self._mode}: rank {rank} round {number}: {step} {reason}"
        )

    @property
    def _mode(self) -> str:
        return " in place" if self.in_place else ""

    def _check_round(self, rank: int, number: int, steps: Round) -> None:
        """Checks types, bounds and rule 3: a written chunk is not used elsewhere in its round."""
        if type(steps) is not tuple:
            raise self._fail(rank, number, steps, "is not a round: yield a tuple of steps")
        writing: set[Cell] = set()
        for step in steps:
            for chunk in _chunks(step):
                if not 0 <= chunk.start < chunk.stop <= self.limits[rank][chunk.buffer]:
                    raise self._fail(rank, number, step, f"names {chunk}, which does not exist")
            if not isinstance(step, Send) and step.chunk.buffer == "sendbuf":
                raise self._fail(rank, number, step, "writes to sendbuf")
            if isinstance(step, Recv | Copy) and not self._is_itself(rank, step):
                cells = self._cells(rank, step.chunk)
                if not writing.isdisjoint(cells):
                    raise self._fail(rank, number, step, "writes what another step is writing")
                writing.update(cells)
        for step in steps:
            if self._is_itself(rank, step):
                continue
            chunks = [*read_by(step), *([step.chunk] if isinstance(step, RecvReduce) else [])]
            used = {cell for chunk in chunks for cell in self._cells(rank, chunk)}
            if not writing.isdisjoint(used):
                raise self._fail(rank, number, step, "uses a chunk that its round is writing")

    def _is_itself(self, rank: int, step: object) -> bool:
        """Whether a step copies a block to its own place, which happens in place."""
        return isinstance(step, Copy) and (
            self._cells(rank, step.chunk) == self._cells(rank, step.source)
        )

    def _read(self, rank: int, number: int, step: object, chunk: Chunk) -> list[Expression]:
        held = self.memory[rank]
        values = [held.get(cell) for cell in self._cells(rank, chunk)]
        if None in values:
            raise self._fail(rank, number, step, f"reads {chunk} before anything was written there")
        return [value for value in values if value is not None]

    def _apply(self, rank: int, number: int, steps: Round) -> None:
        for position, step in enumerate(steps):
            if isinstance(step, Recv):
                self.arrival = self.arrived.pop((rank, position))
                self._write(rank, number, step, self.arrival.values)
            elif isinstance(step, Copy):
                self.arrival = None
                self._write(rank, number, step, self.departed[rank, position])
        for position, step in enumerate(steps):
            if isinstance(step, RecvReduce):
                self.arrival = self.arrived.pop((rank, position))
                came = self.arrival.values
                own = self._read(rank, number, step, step.operand or step.chunk)
                if len(came) != len(own):
                    wanted = f"{_in_number(len(own))} to reduce with"
                    raise self._fail(rank, number, step, f"expected {wanted} from {self.arrival}")
                pairs = zip(came, own) if step.peer < rank else zip(own, came)
                reduced = [self._reduce(rank, number, step, a, b) for a, b in pairs]
                self._write(rank, number, step, reduced)

    def _reduce(
        self, rank: int, number: int, step: RecvReduce, left: Expression, right: Expression
    ) -> Expression:
        if left.chunk != right.chunk:
            own = right if step.peer < rank else left
            wrong = f"reduces {own} and expected chunk {own.chunk} from {self.arrival}"
            raise self._fail(rank, number, step, wrong)
        if left.ranks & right.ranks and not self.contract.idempotent:
            own = right if step.peer < rank else left
            twice = sorted(members(left.ranks & right.ranks))
            wrong = f"counts the contribution of ranks {twice} twice: it holds {own}"
            others = f"and expected others' from {self.arrival}"
            raise self._fail(rank, number, step, f"{wrong}, {others}")
        adjacent = left.ranks.bit_length() == (right.ranks & -right.ranks).bit_length() - 1
        return Expression(
            left.chunk,
            left.ranks | right.ranks,
            self._tree(left.tree, right.tree),
            left.ordered and right.ordered and adjacent,
        )

    def _write(
        self, rank: int, number: int, step: Recv | RecvReduce | Copy, values: list[Expression]
    ) -> None:
        chunk, n, source = step.chunk, self.schedule.chunks, self.arrival
        if len(values) != chunk.length:
            wanted = _in_number(chunk.length)
            raise self._fail(rank, number, step, f"expected {wanted} from {source or 'its copy'}")
        for i, value in zip(range(chunk.start, chunk.stop), values):
            if value.chunk % n != i % n:
                came = f", where it expected piece {i % n} from {source}" if source else ""
                wrong = f"puts piece {value.chunk % n} of a block in place {i % n}{came}"
                raise self._fail(rank, number, step, wrong)
            if self.uneven and not self._fits(rank, chunk.buffer, i // n, value):
                self.uneven = False
            cell = self.cell(rank, chunk.buffer, i)
            self.memory[rank][cell] = value
            self.wrote[rank, cell] = number, step, source

    def _fits(self, rank: int, buffer: str, j: int, value: Expression) -> bool:
        """Whether a value lies in a block of the length of the one that it came from."""
        block = self.contract.block
        assert block is not None, "asked only of collectives with a v-variant"
        origin = self.members[next(members(value.ranks))]
        length = block(origin, "sendbuf", value.chunk // self.schedule.chunks)
        return length == block(self.members[rank], buffer, j)

    def _check_result(self, rank: int) -> bool:
        """Compares ``rank``'s recvbuf with the contract and with rank 0's trees."""
        ordered = True
        for i in range(self.limits[rank]["recvbuf"]):
            wanted = self.contract.result(self.members[rank], i)
            if wanted is None:
                continue
            got = self.memory[rank].get(("recvbuf", i))
            ranks = sum(1 << r for r in wanted.ranks)
            where = f"{self.schedule}{self._mode}: rank {rank} ends with recvbuf[{i}]"
            if got is None:
                raise ScheduleError(f"{where} never written")
            if (got.chunk, got.ranks) != (wanted.chunk, ranks):
                raise ScheduleError(
                    f"{where} = {got}; expected chunk {wanted.chunk} of ranks "
                    f"{list(wanted.ranks)}; {self._written(rank, i)}"
                )
            first, same = self.results.setdefault((got.chunk, got.ranks), (rank, got))
            if same.tree != got.tree and not self.contract.idempotent:
                orders = "so"
                if self.schedule.size <= _READABLE:
                    orders = f"{spelled(self.trees, got)} for {spelled(self.trees, same)}, so"
                raise ScheduleError(
                    f"{where} reduced in another order than on rank {first}, {orders} not bitwise "
                    f"equal to it; {self._written(rank, i)}"
                )
            ordered = ordered and got.ordered
        return ordered

    def _written(self, rank: int, i: int) -> str:
        """Where ``recvbuf[i]`` of ``rank`` got its value."""
        if (rank, ("recvbuf", i)) not in self.wrote:
            return "no step has written there"
        number, step, source = self.wrote[rank, ("recvbuf", i)]
        return f"written in round {number} by {step}{f', from {source.origin}' if source else ''}"


def _chunks(step: object) -> Iterator[Chunk]:
    """Every chunk that a step names."""
    if isinstance(step, Send | Recv | RecvReduce | Copy):
        yield step.chunk
        yield from read_by(step)


def _in_number(count: int) -> str:
    return f"{count} chunk{'s' * (count != 1)}"
