"""The sum of one bucket by codecs, over all ranks or between nodes.

A bucket's matrices are coded; vectors and small tensors, a thousandth of the bytes, travel
uncompressed at the same time.  The part of a gradient that a step's codes leave out is added to the
next step's gradient (error feedback), and is kept only if the step counts: where a gradient of any
rank is not finite, or the loss scale is too large, the ranks skip the step together, and the
residuals are as before the step.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from collectives.codec import Residual
from collectives.coded import Coding, Gathered, TwoPhase
from collectives.communicator import AnyPlan, Communicator
from collectives.phased import Part, Phased
from mpitrain.arrays import Array
from mpitrain.compress.codec import LinearCodec, Remembering, Sketch, Sparse
from mpitrain.compress.dgc import DGC
from mpitrain.config import ConfigError
from mpitrain.parallel.linear_sparse_sums import LinearSum, SparseSum, TensorSum
from mpitrain.parallel.packed_bucket import Packed, Together, ordered
from mpitrain.parallel.summation import KeptElements, Summand
from mpitrain.ranks.together import together

if TYPE_CHECKING:
    from mpitrain.parallel.compressed_summation import CompressedSummation


class KeepingSum(Phased):
    """A sum that keeps values from step to step.

    Attributes:
        is_finite: whether this rank's coded gradients of the step are finite.
    """

    is_finite = True

    @property
    @abstractmethod
    def encoded(self) -> int:
        """Bytes of this rank's code, and of the gradients that travel uncompressed."""

    @property
    @abstractmethod
    def memories(self) -> Iterator[Residual | Sketch]:
        """Objects that keep the values."""

    @abstractmethod
    def kept(self) -> Iterator[KeptElements]:
        """Values kept, by elements of the arena."""

    def state(self) -> Mapping[str, Array]:
        """Other arrays, by name, the same on all replicas."""
        return {}

    def commit(self) -> None:
        """End a step that counts."""
        for memory in self.memories:
            memory.commit()

    def rollback(self) -> None:
        """End a step that is skipped."""
        for memory in self.memories:
            memory.rollback()


class CodedSum(KeepingSum):
    """The sum of one bucket, its matrices by codes.

    Attributes:
        packed: the coded elements, and the rest.
        memory: values kept of this rank's coded elements, as a residual; each of its arrays has the
            shape (coded elements,).
        rest_memory: values that all ranks keep of the sum of the rest, as a momentum.
        owner_residual: part of the own shard of the sum that its code left out.
    """

    def __init__(
        self, summand: Summand, packed: Packed, run: "CompressedSummation", turn: int = 0
    ) -> None:
        """Bind the sum; collective.  ``turn``: earlier sums of the bucket in this step."""
        self.packed = packed
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
            self.memory = run.residual(np.zeros_like(packed.coded.array))
        self.owner_residual: Residual | None = None
        self._coded = self._sum() if packed.coded.array.size else None
        self.algorithm = self._coded.algorithm if self._coded else str(how.codec)
        self.reason = f"{packed.share:.0%} of elements"
        self._rest = packed.bind_rest(comm)
        self._dense = run.dense.bind(summand) if how.table.start and not run.anew else None
        super().__init__(comm, [])

    def _sum(self) -> Phased:
        """The sum of the coded elements, by the collective for the kind of codec."""
        run, comm, packed, memory = self._coding, self._summand.comm, self.packed, self.memory
        how, codec, dice = run.how, run.how.codec, run.dice
        if isinstance(codec, LinearCodec):
            flushes = how.flushes if how.table.flush_every else None
            return LinearSum(comm, codec, packed, memory, dice, flushes)
        if isinstance(codec, Sparse):
            return SparseSum(comm, codec, packed, memory, dice)
        own, total, counts = packed.coded.array, packed.coded.total, packed.coded.counts
        if how.gathers(comm.size) and counts is None:
            return Gathered(comm, Coding(codec, memory, None, dice, self._place), own, total)
        if how.feedback and counts is None:
            shard = packed.part.stop - packed.part.start
            self.owner_residual = run.residual(np.zeros(shard, total.dtype))
        coding = Coding(codec, memory, self.owner_residual, dice, self._place)
        return TwoPhase(comm, coding, own, total, counts, lasts=not run.anew)

    @property
    def encoded(self) -> int:
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
        yield from filter(None, (self.memory, self.rest_memory, self.owner_residual))
        if isinstance(self._coded, LinearSum):
            yield self._coded.sketch

    def kept(self) -> Iterator[KeptElements]:
        packed, alone = self.packed, "" if self.owner_residual else "owner"
        for name, values in self.memory.arrays.items() if self.memory else ():
            part = slice(0, values.size)
            yield from packed.kept(
                name, values, part, coded=True, is_per_replica=True, when_alone=alone
            )
        for name, values in self.rest_memory.arrays.items() if self.rest_memory else ():
            yield from packed.kept(
                name, values, packed.rest.shard, coded=False, is_per_replica=False, is_shared=True
            )
        if self.owner_residual:
            value = self.owner_residual.value
            yield from packed.kept("owner", value, packed.part, coded=True, is_per_replica=False)

    def state(self) -> Mapping[str, Array]:
        """State of a ``LinearCodec``."""
        return self._coded.sketch.state if isinstance(self._coded, LinearSum) else {}

    def Free(self) -> None:
        super().Free()
        for plan in (self._coded, self._rest, self._dense):
            if plan is not None:
                plan.Free()
        self._coding.forget(self)


class NodeSum(KeepingSum):
    """A reduction to the first rank of each node, a sum by codes over these, and a broadcast.

    Memory of a node costs nothing to send, and the sum of k gradients loses less by a code than
    each of them would (BytePS, Jiang et al. 2020).  On one node it is an all-reduce, and nothing is
    coded.  First ranks keep the residuals of the codes.  A residual that another rank has after a
    resume on other nodes is added to its next gradients, so that nothing is lost.

    Cost, of s bytes on m nodes of k ranks: (k - 1) s up and down in each node, and the codec's own
    on m ranks.

    Attributes:
        nodes: number of nodes.
    """

    def __init__(self, summand: Summand, packed: Packed, run: "CompressedSummation") -> None:
        """Bind the sum; collective.  ConfigError on all ranks: MPI has no communicators left."""
        assert summand.counts is None, "the job was refused"
        comm, own, how = summand.comm, summand.own, run.how
        self._summand, self._packed, self._coding = summand, packed, run
        self._node = _made(comm, lambda: comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank))
        is_first = self._node.rank == 0
        self._alike = _made(comm, lambda: comm.Split(is_first, comm.rank))
        self.nodes: int = comm.allreduce(int(is_first))
        self.algorithm = f"{how.codec} between {self.nodes} nodes"
        self.reason = f"{packed.share:.0%} of elements"
        self._up: AnyPlan | None = None
        self._down: AnyPlan | None = None
        if self.nodes == 1:
            self.algorithm, self.reason = "dense", "one node"
            self._up = ordered(self._node, own)
        elif self._node.size > 1:
            ends = (MPI.IN_PLACE, own) if is_first else (own, None)
            self._up = self._node.Reduce_init(*ends, algorithm="binomial_tree")
            self._down = self._node.Bcast_init(own, algorithm="binomial_tree")
        self._across = None
        self._left: Residual | None = None
        if is_first and self.nodes > 1:
            between = replace(summand, comm=self._alike, total=own)
            self._across = run.coded(between, packed.of(between))
        else:
            if how.feedback:
                self._left = run.residual(np.zeros_like(packed.coded.array))
            run.sums.append(self)
        super().__init__(comm, [plan for plan in (self._up, self._down) if plan])

    def phases(self) -> Iterator[Part]:
        own = self._summand.own
        if self._left is not None and self._left.value.any():
            self._hand_over(self._left)
        if self._up:
            yield self._up
        if self._across:
            yield self._across
        if self._down:
            yield self._down
        if self._summand.total is not own:
            self._summand.total[...] = own

    def _hand_over(self, left: Residual) -> None:
        """Add a residual to the gradients."""
        due = np.zeros_like(left.value)
        left.add_to(due)
        left.keep(due, due)
        due *= self._coding.scale
        for run in self._packed.runs_of(slice(0, due.size), coded=True):
            part = due[run.at : run.at + run.stop - run.start]
            self._summand.own[run.start : run.stop] += part

    @property
    def encoded(self) -> int:
        return self._summand.own.nbytes

    @property
    def memories(self) -> Iterator[Residual | Sketch]:
        if self._left:
            yield self._left

    def kept(self) -> Iterator[KeptElements]:
        """The residual that this rank is to hand over."""
        for name, values in self._left.arrays.items() if self._left else ():
            part = slice(0, values.size)
            yield from self._packed.kept(
                name, values, part, coded=True, is_per_replica=True, when_alone="owner"
            )

    def Free(self) -> None:
        super().Free()
        if self._across:
            self._across.Free()
        else:
            self._coding.forget(self)
        self._alike.Free()
        self._node.Free()


def _made(comm: Communicator, make: Callable[[], Communicator]) -> Communicator:
    """A communicator for one bucket, because buckets are complete in any order."""

    def tried() -> Communicator:
        try:
            return make()
        except MPI.Exception as error:
            raise ConfigError(
                "compress.level: nodes takes two communicators for each bucket of gradients, and "
                "MPI has no more of them; raise parallel.bucket_bytes, or set level = 'ranks'"
            ) from error

    return together(comm, tried, ConfigError)
