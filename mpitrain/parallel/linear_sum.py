"""The sum of tensors by a code that adds up: one all-reduce for each of its phases."""

from collections.abc import Iterator

import numpy as np

from collectives.coded import Dice, Part, Phased, Residual
from collectives.communicator import AnyPlan, Communicator
from mpitrain.compress import Linear
from mpitrain.parallel.packing import Packed, ordered


class LinearSum(Phased):
    """The sum of the coded tensors of a bucket.

    Attributes:
        sketch: the code, bound to the tensors.
    """

    def __init__(
        self,
        comm: Communicator,
        code: Linear,
        packed: Packed,
        residual: Residual | None,
        dice: Dice,
        flush_every: int = 0,
    ) -> None:
        """Bind it; collective.

        Args:
            comm: the ranks.
            code: the same on all ranks.
            packed: whose coded elements are summed.
            residual: what this rank's codes left out.
            dice: has the seed of the run, and the step.
            flush_every: steps after which the ranks average their residuals.
        """
        self.algorithm = str(code)
        self.sketch = code.sketch(packed.tensors, dice.seed)
        self._packed, self._residual, self._dice = packed, residual, dice
        self._flush_every, self._size = flush_every, comm.size
        self._given = np.empty_like(packed.coded if residual else packed.coded[:0])
        self._sum = np.empty_like(self._given)
        self._phases = [ordered(comm, array) for array in self.sketch.sums]
        self._flush: AnyPlan | None = None
        if residual and flush_every:
            self._flush = ordered(comm, residual.pending)
        self.sent = -1
        super().__init__([*self._phases, *([self._flush] if self._flush else [])])

    def phases(self) -> Iterator[Part]:
        coded, residual, step = self._packed.coded, self._residual, self._dice.step
        if residual:
            residual.add_to(coded)
            self._given[...] = coded
        for number, _ in enumerate(self.sketch.phases(step)):
            yield self._phases[number]
        if residual:
            self._sum[...] = coded
            self.sketch.sent(self._packed.tensors)
            residual.keep(self._given, coded)
            coded[...] = self._sum
            if self._flush and (step + 1) % self._flush_every == 0:
                yield self._flush
                residual.pending[...] /= self._size
        if self._packed.coded_total is not coded:
            self._packed.coded_total[...] = coded[self._packed.shard]
