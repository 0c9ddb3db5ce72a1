"""The sum of a bucket to which each rank contributes some elements."""

from collections.abc import Iterator

import numpy as np

from collectives.codec import Dice, FeedbackMemory
from collectives.coded import Part, Phased
from collectives.communicator import Communicator
from collectives.sparse import SparseAllreduce
from mpitrain.compress import Sparse
from mpitrain.parallel.packed_bucket import Packed


class SparseSum(Phased):
    """The sum of the elements that a ``Sparse`` code chooses; it loses nothing on the way.

    Cost: see :func:`collectives.sparse_allreduce`; nearly log2 p times the pairs of a rank, or the
    bytes of the vector where the ranks chose too differently for that to pay.
    """

    def __init__(
        self,
        comm: Communicator,
        code: Sparse,
        packed: Packed,
        memory: FeedbackMemory | None,
        dice: Dice,
    ) -> None:
        """Bind it; collective.

        Args:
            comm: the ranks.
            code: the code, the same on all ranks.
            packed: the elements to sum.
            memory: this rank's residual.
            dice: random numbers, with the run's step.
        """
        self.algorithm = f"sparse all-reduce of {code}"
        self._code, self._packed, self._memory, self._dice = code, packed, memory, dice
        self._sum = SparseAllreduce(comm, packed.coded.array.size, packed.coded.array.dtype)
        super().__init__(comm, [])

    @property
    def encoded(self) -> int:
        """Bytes of the pairs of this rank's last run."""
        return self._sum.given

    def phases(self) -> Iterator[Part]:
        coded, memory = self._packed.coded.array, self._memory
        if memory:
            memory.add_to(coded)
        chosen = self._code.select(coded, self._dice.step)
        values = self._code.values(coded[chosen])
        if memory:
            sent = np.zeros_like(coded)
            sent[chosen] = values
            memory.keep(coded, sent)
        self._sum.give(chosen, values)
        yield from self._sum.phases()
        indices, total = self._sum.total
        if indices is None:
            coded[...] = total
        else:
            coded[...] = 0
            coded[indices] = total
        self._packed.coded.take_shard()
