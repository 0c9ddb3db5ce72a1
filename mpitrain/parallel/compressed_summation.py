"""Sums of gradients by codecs, for every store."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import numpy as np

from collectives.codec import Dice
from mpitrain.arrays import Array, Shape
from mpitrain.compress import AnyCodec
from mpitrain.compress.codec import feedback_of
from mpitrain.compress.dgc import DGC
from mpitrain.config import Compress
from mpitrain.parallel.arena import DATA
from mpitrain.parallel.coded_sum import CodedSum
from mpitrain.parallel.packing import Packed
from mpitrain.parallel.summation import (
    Dense,
    KeptElements,
    Sum,
    Summand,
    Summation,
    uncountable,
)


@dataclass(frozen=True)
class CodingOptions:
    """How gradients are coded: a table [compress] with its codec."""

    table: Compress
    codec: AnyCodec

    @property
    def feedback(self) -> bool:
        """Whether the part that a step left out is added to the next step."""
        return feedback_of(self.codec, self.table.feedback) == "on"

    @property
    def votes(self) -> bool:
        """Whether the result is no sum, so that all gradients must be coded."""
        return getattr(self.codec, "votes", False)

    def codes(self, shape: Shape) -> bool:
        """Whether the gradients of a tensor are coded."""
        return self.votes or (len(shape) > 1 and prod(shape) >= self.table.least)


@dataclass
class CompressedSummation(Summation):
    """A :class:`~mpitrain.parallel.summation.Summation` by codecs, and the state of its sums.

    Sums over other groups of ranks than the replicas stay dense: tensors that pipeline stages or
    tensor ranks hold together must stay exactly equal.

    Attributes:
        how: how gradients are coded.
        dice: random numbers, with the run's step.
        dense: uncompressed sums.
        tells: whether all ranks learn that the gradients of one are not finite, so that the sum is
            not, either; otherwise the caller looks at :attr:`is_finite`.
        anew: whether sums are bound in each backward pass and run once; they keep nothing.
        sums: sums that were bound and not freed.
        scale: factor on the gradients of this step.
        share: factor on this rank's gradients before they are coded.
    """

    acts_alone: ClassVar[bool] = True

    how: CodingOptions
    dice: Dice
    dense: Dense
    tells: bool = False
    anew: bool = False
    sums: list[CodedSum] = field(default_factory=list, init=False)
    scale: float = field(default=1.0, init=False)
    share: float = field(default=1.0, init=False)
    _has_begun: bool = field(default=False, init=False)
    #: Whether the gradients of freed sums were finite.
    _were_finite: bool = field(default=True, init=False)
    #: Number of sums of each bucket that were bound in this step.
    _bound: Counter[int] = field(default_factory=Counter, init=False)

    @property
    def no_sum(self) -> str:
        return f"compress.codec: {self.how.codec} has no sums" if self.how.votes else ""

    def bind(self, summand: Summand) -> Sum:
        how, is_data = self.how, summand.bucket.group == DATA
        if self.anew and self._has_begun and self.dice.step < how.table.start:
            return self.dense.bind(summand)
        packed = Packed(summand, lambda shape: is_data and how.codes(shape), tells=self.tells)
        if not packed.coded.array.size and not isinstance(how.codec, DGC):
            return self.dense.bind(summand)
        turn = self._bound[summand.bucket.start]
        self._bound[summand.bucket.start] += 1
        found = CodedSum(summand, packed, self, turn)
        self.sums.append(found)
        return found

    def forget(self, one: CodedSum) -> None:
        """Note that a sum was freed."""
        self._were_finite = self.is_finite
        self.sums.remove(one)

    @property
    def is_finite(self) -> bool:
        """Whether all gradients of this rank that were coded in this step were finite."""
        return self._were_finite and all(one.is_finite for one in self.sums)

    def begin(self, step: int, scale: float) -> None:
        self.dice.step, self.scale, self.share = step, scale, 1.0
        self._has_begun = self._were_finite = True
        self._bound.clear()
        for one in self.sums:
            one.is_finite = True

    @property
    def needs_all(self) -> bool:
        codec = self.how.codec
        return isinstance(codec, DGC) and codec.clip > 0

    def prepare(self, gradients: Array, ranks: int) -> None:
        """Clip by the length of all gradients of this rank, one of ``ranks``."""
        codec = self.how.codec
        if isinstance(codec, DGC) and codec.clip:
            # Gradients that are not finite are not sent at all.
            squares = float(np.square(gradients, dtype=np.float64).sum())
            self.share = codec.share(squares / self.scale**2, ranks)

    def commit(self, factor: float = 1.0) -> None:
        if factor != 1.0:
            raise uncountable(self.dice.step, "parallel.zero = 2 or 3 with a codec sums gradients")
        for one in self.sums:
            one.commit()

    def rollback(self) -> None:
        for one in self.sums:
            one.rollback()

    def kept(self) -> Iterator[KeptElements]:
        return (kept for one in self.sums for kept in one.kept())

    def state(self) -> Mapping[str, Array]:
        return {k: array for one in self.sums for k, array in one.state().items()}
