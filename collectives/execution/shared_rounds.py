"""A rank's rounds in memory that all ranks can address: messages become loads and stores.

A ``RecvReduce`` reads its operand where it lies, in the sender's buffer; a ``Send`` that meets a
``Recv`` is stored by the sender into the receiver's buffer, while it is in the sender's cache.
With the direct all-reduce in segments this is "the owner of a slice reduces it and stores it to all
outputs": 2 p s bytes of loads and stores for p ranks of s bytes, against 11 s (p-1) of a ring that
copies into and out of shared memory (Peng et al., "YHCCL", SC 2023).

On GPUs that map one another's memory, a ``RecvReduce`` is one kernel that reads the other's, and a
rank says how far it has come when a gate tells that its stream has.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from collectives.compile.dataflow import Cell, Dataflow, Endpoint, entered, moved
from collectives.errors import ScheduleError
from collectives.execution.device_plan import Gate, behind
from collectives.execution.memory import Combine, Items, Memory, is_queued
from collectives.execution.messages import Layout
from collectives.execution.plan import Action, BoundRound
from collectives.execution.transport.flags import Flag
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Send

if TYPE_CHECKING:
    from collectives.execution.transport.shared_memory import NodeMemory


class Pending(NamedTuple):
    """A wait ``until`` a count of ``rank``, put off until ``cells`` are next used.

    ``reading`` says that the peer only reads them, so that this rank may go on reading them too.
    """

    cells: frozenset[Cell]
    reading: bool
    rank: int
    until: int


@dataclass
class SharedBinder:
    """Turns one rank's rounds into calls.

    Attributes:
        flow: the schedule's data flow, in place as the caller has it.
        node: the ranks' memory; ``slot`` is that of the counters.
        memory: the kind of memory that the buffers lie in.
        buffers: each rank's buffers, by name.
        met: all ranks are in it when it begins, and may use one another's memory.
    """

    flow: Dataflow
    node: "NodeMemory"
    slot: int
    memory: Memory
    buffers: list[dict[str, Items]]
    layout: Layout
    combine: Combine | None
    met: bool

    def __post_init__(self) -> None:
        node, memory = self.node, self.memory
        self.rank = node.rank
        self.gate = Gate(memory.event()) if is_queued(memory) else None
        first = entered(0) if self.met else 0
        self.told = first  # the count that this rank's last tick says
        self.reached = [first] * node.size
        self.pending: list[Pending] = []
        self.segment = 0
        self.passed = 0  # ticks of the segments before

    def rounds(self, before: Sequence[Action]) -> list[BoundRound]:
        """The rounds of one run; ``before`` comes before any other rank uses this one's memory."""
        last = entered(self.flow.rounds)
        bound = [BoundRound(starts=[self.node.advance(self.slot, last + 1), *before])]
        left: list[Pending] = []
        for segment in range(self.flow.segments):
            self.segment, self.passed = segment, moved(self.flow.period * segment - 1)
            for number, steps in enumerate(self.flow.programs[self.rank]):
                if steps:
                    bound += self.round(number, steps)
            # No later segment uses these cells.
            by_rank = {w.rank: w for w in sorted([*left, *self.pending], key=lambda w: w.until)}
            left, self.pending = [*by_rank.values()], []
        ending = self.wait(left, [])
        if self.gate is None:  # nobody waits for that
            return [*bound, ending]
        return [*bound, *self.ticking(ending, last)]

    def round(self, number: int, steps: Round) -> list[BoundRound]:
        """Round ``number`` of this segment."""
        due = self.due(steps)
        since = max(self.told - self.passed, entered(0) if self.segment else 0)
        tells = self.flow.is_awaited(self.rank, since, entered(number))
        self.told = self.passed + moved(number)
        entering = [self.wait(due, [])] if due or tells else []
        if tells:
            entering = self.ticking(entering[0], self.passed + entered(number))

        moving = BoundRound()
        lent: list[Pending] = []  # our memory that peers read in this round
        late: list[Action] = []
        held: set[Cell] = set()  # what late reductions read and write
        # Stores first: the chunk that a round sends may be one that it then reduces into.
        in_order = sorted(enumerate(steps), key=lambda item: not isinstance(item[1], Send))
        for position, step in in_order:
            target = self.view(self.rank, step.chunk)
            if not target.size:
                continue
            cells = self.flow.cells(self.rank, step.chunk)
            if isinstance(step, Copy):
                moving.add([], self.copy(target, self.view(self.rank, step.source)))
                continue
            other = self.flow.ends[Endpoint(self.rank, number, position)]
            theirs = self.flow.step(other)
            done = self.passed + moved(other.round)
            remote = self.view(other.rank, theirs.chunk)
            match step:
                case Send() if isinstance(theirs, RecvReduce):
                    lent.append(Pending(cells, True, other.rank, done))
                case Send():
                    moving.add(self.available(other), self.copy(remote, target))
                case Recv():
                    self.pending.append(Pending(cells, False, other.rank, done))
                case RecvReduce():
                    flags = self.available(other)
                    busy = any(wait.cells & cells for wait in lent)  # not ours to overwrite yet
                    used = cells | self.flow.reads(self.rank, (step,)) if busy or held else cells
                    if busy or used & held:  # or to use before a late one has
                        held |= used
                        aside = self.memory.empty(remote.size, remote.dtype)
                        moving.add(flags, self.copy(aside, remote))
                        late.append(self.reduction(step, aside, target))
                    else:
                        moving.add(flags, self.reduction(step, remote, target))
        bound = [*entering, *self.ticking(moving, self.told)]
        if late:
            return [*bound, self.wait(lent, late)]
        self.pending += lent
        return bound

    def due(self, steps: Round) -> list[Pending]:
        """The waits, which are pending no more, whose cells these steps use, but for stores of the
        peer's own."""
        if not self.pending:
            return []
        read = self.flow.reads(self.rank, steps)
        stored: dict[int, set[Cell]] = defaultdict(set)
        for step in steps:
            stored[self.flow.storer(self.rank, step)] |= self.flow.writes(self.rank, (step,))

        def is_due(wait: Pending) -> bool:
            if not (wait.reading or wait.cells.isdisjoint(read)):
                return True
            by_others = (cells for rank, cells in stored.items() if rank != wait.rank)
            return not all(map(wait.cells.isdisjoint, by_others))

        due = [wait for wait in self.pending if is_due(wait)]
        if due:
            self.pending = [wait for wait in self.pending if wait not in due]
        return due

    def available(self, end: Endpoint) -> list[Flag]:
        """The condition that this rank may load or store the chunk at ``end``."""
        count = self.flow.available(end)
        return self.flags(end.rank, count if count == entered(0) else self.passed + count)

    def view(self, rank: int, chunk: Chunk) -> Items:
        part = self.flow.at(chunk, self.segment)
        return self.buffers[rank][chunk.buffer][self.layout.items(part)]

    def copy(self, target: Items, source: Items) -> Action:
        return partial(self.memory.copy, target, source)

    def ticking(self, bound: BoundRound, count: int) -> list[BoundRound]:
        """``bound``, and then this rank says how far it has come: what it has queued so far must
        have been done."""
        tick = self.node.tick(self.slot, count)
        rounds = [bound] if self.gate is None else behind(self.gate, bound)
        rounds[-1].add([], tick)
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
        bound = BoundRound()
        bound.add([f for rank, until in latest.items() for f in self.flags(rank, until)], *then)
        return bound

    def reduction(self, step: RecvReduce, arrived: Items, target: Items) -> Action:
        if self.combine is None:
            raise ScheduleError(f"{step} reduces, but no operation was given")
        own = self.view(self.rank, step.operand or step.chunk)
        operands = (arrived, own) if step.peer < self.rank else (own, arrived)
        return self.memory.reduction(self.combine, *operands, target)
