"""The sum of a bucket of which each rank sends some elements."""

from collections.abc import Iterator

import numpy as np

from collectives.codec import Dice, Memory
from collectives.coded import Part, Phased
from collectives.communicator import Communicator
from collectives.sparse import SparseAllreduce
from mpitrain.compress import Sparse
from mpitrain.parallel.packing import Packed


class SparseSum(Phased):
    """The sum of what a ``Sparse`` code chooses: nothing of it is lost on the way.

    Cost: see :func:`collectives.sparse_allreduce`; nearly log2 p times the pairs of a rank, or the
    bytes of the vector where the ranks chose too differently for that to pay.
    """

    def __init__(
        self, comm: Communicator, code: Sparse, packed: Packed, memory: Memory | None, dice: Dice
    ) -> None:
        """Bind it; collective.

        Args:
            comm: the ranks.
            code: the same on all ranks.
            packed: whose coded elements are summed.
            memory: what this rank keeps of what it does not send.
            dice: has the step.
        """
        self.algorithm = f"sparse all-reduce of {code}"
        self._code, self._packed, self._memory, self._dice = code, packed, memory, dice
        self._sum = SparseAllreduce(comm, packed.coded.size, packed.coded.dtype)
        super().__init__(comm, [])

    @property
    def encoded(self) -> int:
        """Bytes of the pairs of this rank's last run."""
        return self._sum.given

    def phases(self) -> Iterator[Part]:
        coded, memory = self._packed.coded, self._memory
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
        if self._packed.coded_total is not coded:
            self._packed.coded_total[...] = coded[self._packed.shard]
