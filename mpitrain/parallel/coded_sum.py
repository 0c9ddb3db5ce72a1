"""The sum of one bucket by codes.

A bucket's matrices are coded; vectors and small tensors, a thousandth of the bytes, travel
uncompressed at the same time.  The part of a gradient that a step's codes leave out is added to the
next step's gradient (error feedback), and is kept only if the step counts: where a gradient of any
rank is not finite, or the loss scale is too large, the ranks skip the step together, and the
residuals are as before the step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import numpy as np

from collectives.codec import Dice, FeedbackMemory, Residual
from collectives.coded import Coding, Gathered, Part, Phased, TwoPhase
from mpitrain.arrays import Array, Shape
from mpitrain.compress import AnyCodec, LinearCodec, Momentum, Remembering, Sketch, Sparse
from mpitrain.compress.feedback import UpdateResidual
from mpitrain.parallel.linear_sum import LinearSum
from mpitrain.parallel.packed_bucket import Packed, Together
from mpitrain.parallel.sparse_sum import SparseSum
from mpitrain.parallel.summation import Dense, KeptElements, Summand


@dataclass(frozen=True)
class CodingOptions:
    """How gradients are coded.

    Attributes:
        code: the codec.
        feedback: whether the part that a step left out is added to the next step.
        start: steps before which all gradients travel uncompressed.
        least: elements below which a tensor travels uncompressed.
        exchange: collective for a ``Codec``: ``two_phase``, ``gathered``, or ``auto`` for the one
            that rounds less often at the same bytes.
        flush_every: steps after which the ranks average the residuals of a ``LinearCodec``, so that
            they do not drift apart; 0: never.
        every: steps from one sum to the next.
        updates: whether residuals are kept in units of weights, that is times the learning rate.
        nodes: whether one rank of each node codes its node's sum.
    """

    code: AnyCodec
    feedback: bool
    start: int = 0
    least: int = 1024
    exchange: str = "auto"
    flush_every: int = 0
    every: int = 1
    updates: bool = False
    nodes: bool = False

    def flushes(self, step: int) -> bool:
        """Whether the ranks average residuals in the sum of this step, counted from 0.

        They do in the first sum after each ``flush_every`` steps.
        """
        done, often = step + 1, self.flush_every
        return often > 0 and done // often != (done - self.every) // often

    @property
    def votes(self) -> bool:
        """Whether the result is no sum, so that all gradients must be coded."""
        return getattr(self.code, "votes", False)

    def codes(self, shape: Shape) -> bool:
        """Whether the gradients of a tensor are coded."""
        return self.votes or (len(shape) > 1 and prod(shape) >= self.least)

    def gathers(self, ranks: int) -> bool:
        """Whether codes of a ``Codec`` are gathered by all ranks, not added up by owners."""
        by_itself = self.exchange == "auto" and ranks == 2 and not self.votes
        return self.exchange == "gathered" or by_itself


class KeepingSum(Protocol):
    """A sum that keeps values from step to step.

    Attributes:
        is_finite: whether this rank's coded gradients of the step are finite.
        working: seconds of computation in all runs so far.
    """

    is_finite: bool
    working: float

    @property
    def encoded(self) -> int: ...

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def kept(self) -> Iterator[KeptElements]: ...
    def state(self) -> Mapping[str, Array]: ...


@dataclass
class CodingRun:
    """State that the coded sums of a run share.

    Attributes:
        how: how gradients are coded.
        dice: random numbers, with the run's step.
        dense: uncompressed sums.
        sums: sums that were bound and not freed.
        tells: whether all ranks learn that the gradients of one are not finite, so that the sum is
            not, either; otherwise the caller looks at :attr:`is_finite`.
        anew: whether sums are bound in each backward pass and run once; they keep nothing.
        scale: factor on the gradients of this step.
        rate: learning rate of this step.
        share: factor on this rank's gradients before they are coded.
    """

    how: CodingOptions
    dice: Dice
    dense: Dense
    tells: bool = False
    anew: bool = False
    sums: list[KeepingSum] = field(default_factory=list, init=False)
    scale: float = field(default=1.0, init=False)
    rate: float = field(default=1.0, init=False)
    share: float = field(default=1.0, init=False)
    #: Whether the gradients of freed sums were finite.
    _were_finite: bool = field(default=True, init=False)
    #: Number of sums of each bucket that were bound in this step.
    _bound: Counter[int] = field(default_factory=Counter, init=False)

    def coded(self, summand: Summand, packed: Packed) -> "CodedSum":
        """The sum of codes of each rank of ``summand.comm``; collective."""
        turn = self._bound[summand.bucket.start]
        self._bound[summand.bucket.start] += 1
        found = CodedSum(summand, packed, self, turn)
        self.sums.append(found)
        return found

    def residual(self, value: Array) -> Residual:
        """A residual in the memory ``value``."""
        updates = self.how.updates
        return UpdateResidual(value, lambda: self.rate) if updates else Residual(value)

    def forget(self, one: KeepingSum) -> None:
        """A sum was freed."""
        self._were_finite = self.is_finite
        self.sums.remove(one)

    @property
    def is_finite(self) -> bool:
        """Whether all gradients of this rank that were coded in this step were finite."""
        return self._were_finite and all(one.is_finite for one in self.sums)


class CodedSum(Phased):
    """The sum of one bucket, its matrices by codes.

    Attributes:
        packed: the coded elements, and the rest.
        memory: values kept of this rank's coded elements, as a residual; each of its arrays has the
            shape (coded elements,).
        rest_memory: values that all ranks keep of the sum of the rest, as a momentum.
        owner_residual: part of the own shard of the sum that its code left out.
        is_finite: whether the gradients of this step are finite.
    """

    def __init__(self, summand: Summand, packed: Packed, run: CodingRun, turn: int = 0) -> None:
        """Bind the sum; collective.  ``turn``: earlier sums of the bucket in this step."""
        self.packed, self.is_finite = packed, True
        self._summand, self._coding = summand, run
        # A bucket has fewer elements than that: each turn has dice of its own.
        self._place = summand.bucket.start + (turn << 40)
        how, comm = run.how, summand.comm
        self.memory: FeedbackMemory | None = None
        self.rest_memory: FeedbackMemory | None = None
        if isinstance(how.code, Remembering):
            self.memory = how.code.memory(np.zeros_like(packed.coded.array))
            if isinstance(how.code, Momentum):
                self.rest_memory = how.code.of_sum(np.zeros_like(packed.rest.sum))
        elif how.feedback:
            self.memory = run.residual(np.zeros_like(packed.coded.array))
        self.owner_residual: Residual | None = None
        self._coded = self._sum() if packed.coded.array.size else None
        self.algorithm = self._coded.algorithm if self._coded else str(how.code)
        self.reason = f"{packed.share:.0%} of elements"
        self._rest = packed.bind_rest(comm)
        self._dense = run.dense.bind(summand) if how.start and not run.anew else None
        super().__init__(comm, [])

    def _sum(self) -> Phased:
        """The sum of the coded elements, by the collective for the kind of code."""
        run, comm, packed, memory = self._coding, self._summand.comm, self.packed, self.memory
        how, code, dice = run.how, run.how.code, run.dice
        if isinstance(code, LinearCodec):
            flushes = how.flushes if how.flush_every else None
            return LinearSum(comm, code, packed, memory, dice, flushes)
        if isinstance(code, Sparse):
            return SparseSum(comm, code, packed, memory, dice)
        own, total, counts = packed.coded.array, packed.coded.total, packed.coded.counts
        if how.gathers(comm.size) and counts is None:
            return Gathered(comm, Coding(code, memory, None, dice, self._place), own, total)
        if how.feedback and counts is None:
            shard = packed.part.stop - packed.part.start
            self.owner_residual = run.residual(np.zeros(shard, total.dtype))
        coding = Coding(code, memory, self.owner_residual, dice, self._place)
        return TwoPhase(comm, coding, own, total, counts, lasts=not run.anew)

    @property
    def encoded(self) -> int:
        """Bytes of this rank's code, and of the rest."""
        code, rest = self._coding.how.code, self.packed.rest.array.nbytes
        if isinstance(self._coded, LinearSum | SparseSum):
            return self._coded.encoded + rest
        assert not isinstance(code, LinearCodec | Sparse), "these have sums of their own"
        return code.nbytes(self.packed.coded.array.size) + rest

    def phases(self) -> Iterator[Part]:
        run, rest = self._coding, self._rest
        if self._dense is not None and run.dice.step < run.how.start:
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

    def commit(self) -> None:
        """End a step that counts."""
        for one in self._remembering:
            one.commit()

    def rollback(self) -> None:
        """End a step that is skipped."""
        for one in self._remembering:
            one.rollback()

    @property
    def _remembering(self) -> Iterator[FeedbackMemory | Sketch]:
        yield from filter(None, (self.memory, self.rest_memory, self.owner_residual))
        if isinstance(self._coded, LinearSum):
            yield self._coded.sketch

    def kept(self) -> Iterator[KeptElements]:
        """Values kept, by elements of the arena."""
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
