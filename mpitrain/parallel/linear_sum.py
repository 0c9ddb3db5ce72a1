"""The sum of tensors by a code that adds up: one all-reduce for each of its phases."""

from collections.abc import Callable, Iterator

import numpy as np

from collectives.codec import Dice, FeedbackMemory, Residual
from collectives.coded import Part, Phased
from collectives.communicator import AnyPlan, Communicator
from mpitrain.compress import LinearCodec
from mpitrain.parallel.packed_bucket import Packed, ordered


class LinearSum(Phased):
    """The sum of the coded tensors of a bucket.

    Attributes:
        sketch: the code, bound to the tensors.
    """

    def __init__(
        self,
        comm: Communicator,
        code: LinearCodec,
        packed: Packed,
        memory: FeedbackMemory | None,
        dice: Dice,
        flushes: Callable[[int], bool] | None = None,
    ) -> None:
        """Bind it; collective.

        Args:
            comm: the ranks.
            code: the code, the same on all ranks.
            packed: the elements to sum.
            memory: this rank's residual.
            dice: seed of the run, and the step.
            flushes: whether the ranks average their residuals in a step; None: never.
        """
        self.algorithm = str(code)
        self.sketch = code.sketch(packed.tensors, dice.seed)
        self._packed, self._memory, self._dice = packed, memory, dice
        self._flushes, self._size = flushes, comm.size
        self._given = np.empty_like(packed.coded.array if memory else packed.coded.array[:0])
        self._sum = np.empty_like(self._given)
        self._phases = [ordered(comm, array) for array in self.sketch.sums]
        self._flush: AnyPlan | None = None
        if flushes and isinstance(memory, Residual):
            self._left = memory.pending
            self._flush = ordered(comm, self._left)
        super().__init__(comm, [*self._phases, *([self._flush] if self._flush else [])])

    @property
    def encoded(self) -> int:
        """Bytes of the code of this rank's tensors."""
        return sum(array.nbytes for array in self.sketch.sums)

    def phases(self) -> Iterator[Part]:
        coded, memory, step = self._packed.coded.array, self._memory, self._dice.step
        if memory:
            memory.add_to(coded)
            self._given[...] = coded
        for number, _ in enumerate(self.sketch.phases(step)):
            yield self._phases[number]
        if memory:
            self._sum[...] = coded
            self.sketch.sent(self._packed.tensors)
            memory.keep(self._given, coded)
            coded[...] = self._sum
            if self._flush and self._flushes and self._flushes(step):
                yield self._flush
                self._left /= self._size
        self._packed.coded.take_shard()
