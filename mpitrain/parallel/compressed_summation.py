"""Sums of gradients by codes, for every store."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress import Momentum
from mpitrain.config import ConfigError
from mpitrain.parallel.arena import DATA, Arena
from mpitrain.parallel.coded_sum import CodingRun
from mpitrain.parallel.node_sum import NodeSum
from mpitrain.parallel.packed_bucket import Packed
from mpitrain.parallel.summation import KeptElements, Sum, Summand, Summation


class CompressedSummation(CodingRun, Summation):
    """A :class:`~mpitrain.parallel.summation.Summation` by codes.

    Sums over other groups of ranks than the replicas stay dense: tensors that pipeline stages or
    tensor ranks hold together must stay exactly equal.
    """

    acts_alone: ClassVar[bool] = True
    _has_begun = False

    def check(self, arena: Arena) -> None:
        """Check that all gradients may be coded; not collective.

        Raises:
            ConfigError: the code votes, and some gradients are summed over more than the replicas.
        """
        exact = [tensor.name for tensor in arena.tensors if tensor.group != DATA]
        if self.how.votes and exact:
            raise ConfigError(
                f"compress.codec: {self.how.code} has no sums, and {', '.join(exact[:3])} "
                "are summed over other ranks than the replicas; set another codec"
            )

    def bind(self, summand: Summand) -> Sum:
        """The sum of these arrays; collective over ``summand.comm``."""
        how, is_data = self.how, summand.bucket.group == DATA
        if self.anew and self._has_begun and self.dice.step < how.start:
            return self.dense.bind(summand)
        packed = Packed(summand, lambda shape: is_data and how.codes(shape), tells=self.tells)
        if not packed.coded.array.size and not isinstance(how.code, Momentum):
            return self.dense.bind(summand)
        return NodeSum(summand, packed, self) if how.nodes else self.coded(summand, packed)

    def begin(self, step: int, scale: float, rate: float = 1.0) -> None:
        """Begin ``step``, counted from 0, whose gradients come multiplied by ``scale``."""
        self.dice.step, self.scale, self.rate, self.share = step, scale, rate, 1.0
        self._has_begun = self._were_finite = True
        self._bound.clear()
        for one in self.sums:
            one.is_finite = True

    @property
    def needs_all(self) -> bool:
        """Whether the first sum may begin only when all gradients of this rank are there."""
        code = self.how.code
        return isinstance(code, Momentum) and code.clip > 0

    def prepare(self, gradients: Array, ranks: int) -> None:
        """Clip by the length of all gradients of this rank, one of ``ranks``."""
        code = self.how.code
        if isinstance(code, Momentum) and code.clip:
            # Gradients that are not finite are not sent at all.
            squares = float(np.square(gradients, dtype=np.float64).sum())
            self.share = code.share(squares / self.scale**2, ranks)

    def commit(self) -> None:
        """End a step that counts."""
        for one in self.sums:
            one.commit()

    def rollback(self) -> None:
        """End a step that is skipped."""
        for one in self.sums:
            one.rollback()

    def kept(self) -> Iterator[KeptElements]:
        """Values kept by all sums."""
        return (kept for one in self.sums for kept in one.kept())

    def state(self) -> Mapping[str, Array]:
        """State of ``Linear`` codes."""
        return {k: array for one in self.sums for k, array in one.state().items()}
