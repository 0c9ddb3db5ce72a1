"""Sums of a bucket's coded tensors, by the collective for the kind of codec.

A ``Codec`` has :class:`~collectives.coded.TwoPhase`.
"""

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from collectives.codec import Dice, Residual
from collectives.communicator import Communicator
from collectives.phased import Part, Phased
from collectives.sparse import SparseAllreduce
from mpitrain.compress.codec import LinearCodec, Sparse
from mpitrain.parallel.packing import Packed, ordered


class TensorSum(Phased):
    """The sum of the coded tensors of a bucket.

    Its constructors take the ranks, the codec (the same on all ranks), the elements to sum, this
    rank's residual, and random numbers with the run's step.  They are collective.
    """

    @property
    @abstractmethod
    def encoded(self) -> int:
        """Bytes of this rank's code."""


class LinearSum(TensorSum):
    """The sum by a codec whose codes add up: one all-reduce for each of its phases.

    Attributes:
        sketch: the codec, bound to the tensors.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: LinearCodec,
        packed: Packed,
        memory: Residual | None,
        dice: Dice,
    ) -> None:
        self.algorithm = str(codec)
        self.sketch = codec.sketch(packed.tensors, dice.seed)
        self._packed, self._memory, self._dice = packed, memory, dice
        self._given = np.empty_like(packed.coded.array if memory else packed.coded.array[:0])
        self._sum = np.empty_like(self._given)
        self._phases = [ordered(comm, array) for array in self.sketch.sums]
        super().__init__(comm, self._phases)

    @property
    def encoded(self) -> int:
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
        self._packed.coded.take_shard()


class SparseSum(TensorSum):
    """The sum of the elements that a ``Sparse`` codec chooses.

    It loses nothing on the way, or, in a ring, what the memory gets back.

    Cost: see :func:`collectives.sparse_allreduce`; nearly log2 p times the pairs of a rank, or the
    bytes of the vector where the ranks chose too differently for that to pay.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Sparse,
        packed: Packed,
        memory: Residual | None,
        dice: Dice,
        algorithm: str,
    ) -> None:
        """``algorithm``: as of :func:`collectives.sparse_allreduce`."""
        self.algorithm = f"sparse all-reduce of {codec}"
        self._codec, self._packed, self._memory, self._dice = codec, packed, memory, dice
        coded = packed.coded.array
        self._sum = SparseAllreduce(comm, coded.size, coded.dtype, algorithm)
        super().__init__(comm, [])

    @property
    def encoded(self) -> int:
        return self._sum.given

    def phases(self) -> Iterator[Part]:
        coded, memory = self._packed.coded.array, self._memory
        if memory:
            memory.add_to(coded)
        chosen = self._codec.select(coded, self._dice.step)
        values = coded[chosen]
        if memory:
            sent = np.zeros_like(coded)
            sent[chosen] = values
            memory.keep(coded, sent)
        self._sum.give(chosen, values)
        yield from self._sum.phases()
        if memory:
            memory.give_back(*self._sum.pruned)
        indices, total = self._sum.total
        if indices is None:
            coded[...] = total
        else:
            coded[...] = 0
            coded[indices] = total
        self._packed.coded.take_shard()
