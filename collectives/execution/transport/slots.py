"""Slots of a node's memory, through which two of its ranks hand each other ordinary memory.

A rank copies what it sends into a slot, and its peer reduces or copies straight out of it.  Each
pair of ranks has two slots and swaps them with every exchange: *a rank stores into the slot that it
read last*.  So it knows without a word that the slot is free, and one count an exchange is enough:
the one that says that the message is there.  It also decides the speed: where a core stores to a
line that another one has read since, processors may take many times as long.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from collectives.execution.plan import Plan
from collectives.execution.transport import Bytes, Transport
from collectives.execution.transport.flags import BLOCKING, Flag, RunCount
from collectives.execution.waiting import Polled

if TYPE_CHECKING:
    from collectives.execution.transport.shared_memory import NodeMemory

#: Bytes of a slot: a half or a whole level-2 cache; few Python calls a byte.
SLOT_BYTES = 1 << 19
#: Bytes of the line that says to which call the message in a slot belongs.
_LABEL_BYTES = 64


class SlotPair(RunCount):
    """The two slots of this rank and a peer.

    Its ``base`` is the count of the peer from which on the slot of ``turn`` is free.

    Attributes:
        slots: their memory.
        labels: a word of each slot for the call whose message is in it.
        turn: the slot that this rank stores to in the next exchange; the peer has the other one.
    """

    __slots__ = ("_free_at", "labels", "slots", "turn")

    def __init__(
        self, slots: tuple[Bytes, Bytes], turn: int, labels: "Sequence[memoryview[int]]" = ()
    ) -> None:
        super().__init__()
        self.slots = slots
        self.labels = labels
        self.turn = turn
        self._free_at = [0, 0]

    def swap(self, stored_until: int, reads: bool) -> None:
        """An exchange is over for this rank.

        Args:
            stored_until: the count of the peer that says that it has read what this rank stored; 0
                if that was nothing.
            reads: whether this rank has read what the peer stored.
        """
        turn = self.turn
        if stored_until:
            self._free_at[turn] = stored_until
        self.turn = turn = 1 - turn
        if reads:
            self._free_at[turn] = 0
        self.base = self._free_at[turn]


class InLine(Polled):
    """A plan's place in the line of those whose runs have begun, in the shape of a request.

    All ranks begin the runs of a communicator in one order, so plans that take turns need no slots
    of their own.

    Attributes:
        plan: the plan, which whoever waits behind it moves along.
    """

    def __init__(self, line: "deque[InLine]") -> None:
        self._line = line
        self.plan: Callable[[], Plan | None] = lambda: None

    def Start(self) -> None:
        self._line.append(self)

    def Test(self) -> bool:
        while (first := self._line[0]) is not self:
            plan = first.plan()
            if plan is None or not plan.Test():
                return False
        return True

    def leave(self) -> None:
        """The run is over."""
        self._line.popleft()


@dataclass(eq=False)
class Slots:
    """The slots of a communicator's ranks on this node.  Making it is collective.

    A pair takes 1 MiB, once a schedule has used it.

    Attributes:
        node: the memory, with counters; nothing else counts in it.
        ranks: the communicator's numbers of the node's ranks; by default, all are on it.
        transport: carries messages to other nodes, if there are some.
        line: the runs that have begun; the first one has the slots.
        pairs: the pairs of this rank, by peer.
    """

    node: "NodeMemory"
    ranks: Sequence[int] = ()
    transport: Transport | None = None
    line: deque[InLine] = field(default_factory=deque)
    counters = BLOCKING

    def __post_init__(self) -> None:
        rank, size = self.node.rank, self.node.size
        self.ranks = self.ranks or range(size)
        self.rank = self.ranks[rank]
        # Each rank's memory has the slots of its pairs with higher ranks; all labels come last, so
        # that slots begin with pages.
        segments = self.node.allocate(2 * (SLOT_BYTES + _LABEL_BYTES) * (size - 1 - rank))
        self.pairs: dict[int, SlotPair] = {}
        for peer in (peer for peer in range(size) if peer != rank):
            low, high = sorted((rank, peer))
            start = 2 * SLOT_BYTES * (high - low - 1)
            one, other = segments[low][start : start + 2 * SLOT_BYTES].reshape(2, -1)
            start = 2 * SLOT_BYTES * (size - 1 - low) + 2 * _LABEL_BYTES * (high - low - 1)
            lines = segments[low][start : start + 2 * _LABEL_BYTES].reshape(2, -1)
            labels = [memoryview(line.data).cast("q") for line in lines]
            self.pairs[self.ranks[peer]] = SlotPair((one, other), int(rank > peer), labels)

    def flag(self, peer: int, value: int, runs: RunCount | None = None) -> Flag:
        """The condition that ``peer`` has counted up to ``value``."""
        return self.node.flag(self.ranks.index(peer), self.counters, value, runs)
