"""Slots of a node's memory, through which two of its ranks hand each other ordinary memory.

A rank copies what it sends into a slot, and its peer reduces or copies straight out of it.  Each
pair of ranks has two slots and swaps them with every exchange: *a rank stores into the slot that it
read last*.  So it knows without a word that the slot is free, and one count an exchange is enough:
the one that says that the message is there.  It also decides the speed: where a core stores to a
line that another one has read since, processors may take many times as long.
"""

from typing import TYPE_CHECKING

from collectives.execution.tags import TagPool
from collectives.execution.transport import Bytes
from collectives.execution.transport.flags import BLOCKING, RunCount

if TYPE_CHECKING:
    from collectives.execution.transport.shared_memory import NodeMemory

#: Bytes of a slot of blocking calls: a message of it is reduced while it is in a level-2 cache.
SLOT_BYTES = 1 << 20
#: Bytes of a slot of the other plans, and how many of these have slots at a time.
PLAN_SLOT_BYTES, PLANS = 1 << 18, 16


class Pair(RunCount):
    """The two slots of this rank and a peer.

    Its ``base`` is the count of the peer from which on the slot of ``turn`` is free.

    Attributes:
        slots: their memory.
        turn: the slot that this rank stores to in the next exchange; the peer has the other one.
    """

    __slots__ = ("_free_at", "slots", "turn")

    def __init__(self, slots: tuple[Bytes, Bytes], turn: int) -> None:
        super().__init__()
        self.slots = slots
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


class Slots:
    """The slots of one communicator, all of whose ranks are on one node.

    A pair takes 2 MiB for the blocking calls and 512 KiB for each of at most 16 other plans, once a
    schedule has used it.

    Attributes:
        node: the memory, with counters; nothing else counts in it.
        numbers: those of the plans that have slots of their own.
    """

    def __init__(self, node: "NodeMemory") -> None:
        self.node = node
        self.numbers = TagPool(PLANS)
        self._pairs: dict[int, dict[int, Pair]] = {}

    def pairs(self, number: int | None) -> tuple[int, dict[int, Pair]]:
        """The counters and the pairs of a plan, or of all blocking calls, by peer.  Collective."""
        counters = BLOCKING if number is None else BLOCKING + 1 + number
        if counters not in self._pairs:
            nbytes = SLOT_BYTES if number is None else PLAN_SLOT_BYTES
            self._pairs[counters] = self._made(nbytes)
        return counters, self._pairs[counters]

    def _made(self, nbytes: int) -> dict[int, Pair]:
        """Each rank's memory has the slots of its pairs with higher ranks."""
        rank, size = self.node.rank, self.node.size
        segments = self.node.allocate(2 * nbytes * (size - 1 - rank))
        pairs = {}
        for peer in range(size):
            if peer != rank:
                low, high = sorted((rank, peer))
                start = 2 * nbytes * (high - low - 1)
                own = segments[low][start : start + 2 * nbytes]
                pairs[peer] = Pair((own[:nbytes], own[nbytes:]), int(rank > peer))
        return pairs
