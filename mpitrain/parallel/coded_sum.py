"""The sum of one bucket by codecs.

A bucket's matrices are coded; vectors and small tensors, a thousandth of the bytes, travel
uncompressed at the same time.  The part of a gradient that a step's codes leave out is added to the
next step's gradient (error feedback), and is kept only if the step counts: where a gradient of any
rank is not finite, or the loss scale is too large, the ranks skip the step together, and the
residuals are as before the step.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from collectives.codec import Residual
from collectives.coded import Coding, TwoPhase
from collectives.phased import Part, Phased
from mpitrain.arrays import Array
from mpitrain.compress.codec import LinearCodec, Remembering, Sketch, Sparse
from mpitrain.compress.dgc import DGC
from mpitrain.parallel.linear_sparse_sums import LinearSum, SparseSum, TensorSum
from mpitrain.parallel.packing import Packed, Together
from mpitrain.parallel.summation import KeptElements, Summand

if TYPE_CHECKING:
    from mpitrain.parallel.compressed_summation import CompressedSummation


class CodedSum(Phased):
    """The sum of one bucket, its matrices by codes.

    Attributes:
        start: the bucket's first element, in the arena.
        packed: the coded elements, and the rest.
        memory: values kept of this rank's coded elements, as a residual; each of its arrays has the
            shape (coded elements,).
        rest_memory: values that all ranks keep of the sum of the rest, as a momentum.
        owner_residual: part of the own shard of the sum that its code left out.
        is_finite: whether this rank's coded gradients of the step are finite.
    """

    is_finite = True

    def __init__(
        self, summand: Summand, packed: Packed, run: "CompressedSummation", turn: int = 0
    ) -> None:
        """Bind the sum; collective.  ``turn``: earlier sums of the bucket in this step."""
        self.start, self.packed = summand.bucket.start, packed
        self._summand, self._coding = summand, run
        # A bucket has fewer elements than that: each turn has dice of its own.
        self._place = summand.bucket.start + (turn << 40)
        how, comm = run.how, summand.comm
        self.memory: Residual | None = None
        self.rest_memory: Residual | None = None
        if isinstance(how.codec, Remembering):
            self.memory = how.codec.memory(np.zeros_like(packed.coded.array))
            if isinstance(how.codec, DGC):
                self.rest_memory = how.codec.of_sum(np.zeros_like(packed.rest.sum))
        elif how.feedback:
            self.memory = Residual(np.zeros_like(packed.coded.array))
        self.owner_residual: Residual | None = None
        self._coded = self._sum() if packed.coded.array.size else None
        self.algorithm = self._coded.algorithm if self._coded else str(how.codec)
        self.reason = f"for {packed.share:.0%} of the elements"
        self._rest = packed.bind_rest(comm)
        self._dense = run.dense.bind(summand) if how.table.start and not run.anew else None
        super().__init__(comm, [])

    def _sum(self) -> Phased:
        """The sum of the coded elements, by the collective for the kind of codec."""
        run, comm, packed, memory = self._coding, self._summand.comm, self.packed, self.memory
        how, codec, dice = run.how, run.how.codec, run.dice
        if isinstance(codec, LinearCodec):
            return LinearSum(comm, codec, packed, memory, dice)
        if isinstance(codec, Sparse):
            return SparseSum(comm, codec, packed, memory, dice, how.table.sparse)
        own, total, counts = packed.coded.array, packed.coded.total, packed.coded.counts
        if how.feedback and counts is None:
            shard = packed.part.stop - packed.part.start
            self.owner_residual = Residual(np.zeros(shard, total.dtype))
        coding = Coding(codec, memory, self.owner_residual, dice, self._place)
        return TwoPhase(comm, coding, own, total, counts, lasts=not run.anew)

    @property
    def encoded(self) -> int:
        """Bytes of this rank's code, and of the gradients that travel uncompressed."""
        codec, rest = self._coding.how.codec, self.packed.rest.array.nbytes
        if isinstance(self._coded, TensorSum):
            return self._coded.encoded + rest
        assert not isinstance(codec, LinearCodec | Sparse), "these have sums of their own"
        return codec.nbytes(self.packed.coded.array.size) + rest

    def phases(self) -> Iterator[Part]:
        run, rest = self._coding, self._rest
        if self._dense is not None and run.dice.step < run.how.table.start:
            yield self._dense
            return
        scale = run.scale
        self.is_finite = self.packed.pack(scale, run.share)
        for plan in self._coded.phases() if self._coded else ():
            yield Together([plan, rest]) if rest else plan
            rest = None
        if rest:
            yield rest
        self.is_finite = self.packed.all_finite(self.is_finite)
        if self.rest_memory:
            self.rest_memory.add_to(self.packed.rest.sum)
        self.packed.unpack(scale, self.is_finite)

    @property
    def memories(self) -> Iterator[Residual | Sketch]:
        """Objects that keep values from step to step."""
        yield from filter(None, (self.memory, self.rest_memory, self.owner_residual))
        if isinstance(self._coded, LinearSum):
            yield self._coded.sketch

    def kept(self) -> Iterator[KeptElements]:
        """Values kept, by elements of the arena."""
        packed = self.packed
        for name, values in self.memory.arrays.items() if self.memory else ():
            part = slice(0, values.size)
            yield from packed.kept(name, values, part, coded=True, is_per_replica=True)
        for name, values in self.rest_memory.arrays.items() if self.rest_memory else ():
            yield from packed.kept(
                name, values, packed.rest.shard, coded=False, is_per_replica=False, is_shared=True
            )
        if self.owner_residual:
            value = self.owner_residual.value
            yield from packed.kept("owner", value, packed.part, coded=True, is_per_replica=False)

    def state(self) -> Mapping[str, Array]:
        """State of a ``LinearCodec``, by name, the same on all replicas."""
        return self._coded.sketch.state if isinstance(self._coded, LinearSum) else {}

    def commit(self) -> None:
        """End a step that counts."""
        for memory in self.memories:
            memory.commit()

    def rollback(self) -> None:
        """End a step that is skipped."""
        for memory in self.memories:
            memory.rollback()

    def Free(self) -> None:
        super().Free()
        for plan in (self._coded, self._rest, self._dense):
            if plan is not None:
                plan.Free()
        self._coding.forget(self)
