"""Binds a schedule to ordinary memory that the ranks of a node read in one another's processes.

The waits are those of shared memory (:class:`SharedBinder`), but
nobody stores into another's buffer: what a ``Send`` offers, its receiver copies, and what a
``RecvReduce`` needs, it reads in pieces that stay in its cache.  So with p ranks the direct
all-reduce of s bytes copies 2 (p-1)/p s bytes on each rank, once.

At the end of a run the ranks tell one another whether all reads were whole; if one was not, all
raise.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from collectives.analysis.dataflow import Dataflow, entered
from collectives.errors import CollectiveError
from collectives.execution.memory import Combine, Items
from collectives.execution.messages import Layout
from collectives.execution.plan import Action, BoundRound
from collectives.execution.shared_rounds import SharedBinder

if TYPE_CHECKING:
    from collectives.execution.transport.attach import AttachedMemory
    from collectives.execution.transport.shared_memory import NodeMemory


class AttachedBinder(SharedBinder):
    """As :class:`SharedBinder`; the others' buffers are only read."""

    pulls = True

    def __init__(
        self,
        flow: Dataflow,
        node: "NodeMemory",
        slot: int,
        memory: "AttachedMemory",
        buffers: list[dict[str, Items]],
        layout: Layout,
        combine: Combine | None,
        met: bool,
    ) -> None:
        super().__init__(flow, node, slot, memory, buffers, layout, combine, met)
        self.memory: AttachedMemory = memory
        self.mark = node.mark(slot)

    def rounds(self, before: Sequence[Action], after: Sequence[Action]) -> list[BoundRound]:
        ended = entered(self.flow.rounds)
        bound = super().rounds([self.memory.begin, *before], [*after, self.tell])
        everybody = BoundRound()
        for rank in range(self.node.size):
            self.add(everybody, self.flags(rank, ended))
        self.add(everybody, [], self.expect_whole)
        return [*bound, everybody]

    def tell(self) -> None:
        """Tells the others of a read that has failed."""
        if self.memory.failed is not None:
            rank, error = self.memory.failed
            self.mark.set(rank, error.errno or 0)

    def expect_whole(self) -> None:
        """
        Raises:
            CollectiveError: on all ranks, if a read failed on one.
        """
        found = self.mark.found()
        if found is None:
            return
        reader, owner, number = found
        why: Any = os.strerror(number)
        raise CollectiveError(
            f"rank {reader} could not read all of rank {owner}'s buffer: {why}; it must stay as "
            "it is until the collective has ended on its rank: keep it until then, or leave "
            "attach out"
        )
