"""Sums of gradients by codes: which elements of a bucket are coded, and what their codes leave out.

A bucket's matrices are coded; vectors and small tensors, a thousandth of the bytes, travel as they
are, at the same time.  What a step's codes leave out is added to the next step's gradients (error
feedback), and is kept only if the step counts: where a gradient of any rank is not finite, or the
loss scale is too large, the ranks skip the step together, and the residuals are as if it had not
been.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from collectives.coded import Dice, Gathered, Part, Phased, Residual, TwoPhase, shards
from collectives.communicator import Communicator
from mpitrain.arena import DATA
from mpitrain.compress import Compressor, Linear, Sparse
from mpitrain.parallel.linear_sum import LinearSum
from mpitrain.parallel.packing import Packed, Together
from mpitrain.parallel.summation import Dense, Sum, Summand


@dataclass(frozen=True)
class Compression:
    """How gradients are coded.

    Attributes:
        code: what codes them.
        feedback: add what a step left out to the next step.
        start: steps before which everything travels as it is.
        least: elements below which a tensor travels as it is.
        exchange: of a ``Codec``: ``two_phase``, ``gathered``, or ``auto`` for the one that rounds
            less often at the same bytes.
        flush_every: steps after which the ranks average what a ``Linear`` code left out, so that it
            does not drift apart; 0: never.
    """

    code: Compressor
    feedback: bool
    start: int = 0
    least: int = 1024
    exchange: str = "auto"
    flush_every: int = 0


@dataclass
class Compressed:
    """A :class:`~mpitrain.parallel.summation.Summation` by codes.

    Sums of other groups of ranks than the replicas stay dense: what pipeline stages or tensor ranks
    hold together must stay exactly equal.

    Attributes:
        dice: whose step is that of the run.
        exchanges: the sums that were bound and not freed, those that are coded.
    """

    compression: Compression
    dice: Dice
    dense: Dense
    exchanges: "list[Exchange]" = field(default_factory=list)

    def bind(self, summand: Summand) -> Sum:
        """The sum of these arrays; collective over ``summand.comm``."""
        packed = Packed(summand, self.compression.least)
        if summand.bucket.group != DATA or not packed.coded.size:
            return self.dense.bind(summand)
        exchange = Exchange(summand, packed, self)
        self.exchanges.append(exchange)
        return exchange

    def begin(self, step: int, scale: float) -> None:
        """The gradients of ``step``, counted from 0, come multiplied by ``scale``."""
        self.dice.step = step
        for exchange in self.exchanges:
            exchange.is_finite = True
            for residual in exchange.residuals.values():
                residual.scale = scale

    @property
    def is_finite(self) -> bool:
        """Whether all gradients of this rank that were coded in this step were."""
        return all(exchange.is_finite for exchange in self.exchanges)

    def commit(self) -> None:
        """The step counts."""
        for exchange in self.exchanges:
            exchange.commit()

    def rollback(self) -> None:
        """The step is skipped."""
        for exchange in self.exchanges:
            exchange.rollback()


class Exchange(Phased):
    """The sum of one bucket, its matrices by codes.

    Attributes:
        residuals: what codes left out, by name: ``own`` of shape (coded elements,), and ``owner``
            of the sums of the own shard.
        packed: which elements are coded.
        is_finite: whether the gradients of this step are.
    """

    def __init__(self, summand: Summand, packed: Packed, made_by: Compressed) -> None:
        """Bind it; collective."""
        compression = made_by.compression
        self.packed = packed
        self.is_finite = True
        self._summand = summand
        self._start = compression.start
        self._dice = made_by.dice
        self._made_by = made_by
        self.residuals: dict[str, Residual] = {}
        if compression.feedback:
            self.residuals["own"] = Residual(np.zeros_like(packed.coded))
        comm, place = summand.comm, summand.bucket.start
        self._coded: Phased
        if isinstance(compression.code, Linear):
            self._coded = LinearSum(
                comm,
                compression.code,
                packed,
                self.residuals.get("own"),
                self._dice,
                compression.flush_every,
            )
        else:
            self._coded = self._element_sum(compression, comm, place)
        self.algorithm, self.reason = self._coded.algorithm, f"of {packed.share:.0%} of elements"
        self._rest = packed.bind_rest(comm)
        self._dense = made_by.dense.bind(summand) if compression.start else None
        super().__init__([])

    def _element_sum(self, compression: Compression, comm: Communicator, place: int) -> Phased:
        code, packed = compression.code, self.packed
        assert not isinstance(code, Linear | Sparse), "which has sums of its own"
        total, dice, own = packed.coded_total, self._dice, self.residuals.get("own")
        gathered = compression.exchange == "gathered" or (
            compression.exchange == "auto" and comm.size == 2
        )
        if gathered and packed.coded_counts is None:
            return Gathered(comm, code, packed.coded, total, residual=own, dice=dice, place=place)
        owner = None
        if compression.feedback and packed.coded_counts is None:
            length = shards(packed.coded.size, comm.size)[comm.rank]
            owner = self.residuals["owner"] = Residual(np.zeros(length, np.float64))
        return TwoPhase(
            comm,
            code,
            packed.coded,
            total,
            packed.coded_counts,
            residual=own,
            owner_residual=owner,
            dice=dice,
            place=place,
        )

    def phases(self) -> Iterator[Part]:
        if self._dense is not None and self._dice.step < self._start:
            yield self._dense
            return
        self.is_finite = self.packed.pack()
        first = True
        for plan in self._coded.phases():
            yield Together([plan, self._rest]) if first and self._rest else plan
            first = False
        self.packed.unpack(self.is_finite)

    def commit(self) -> None:
        """The step counts."""
        for residual in self.residuals.values():
            residual.commit()

    def rollback(self) -> None:
        """The step is skipped."""
        for residual in self.residuals.values():
            residual.rollback()

    def Free(self) -> None:
        super().Free()
        self._coded.Free()
        for plan in (self._rest, self._dense):
            if plan is not None:
                plan.Free()
        self._made_by.exchanges.remove(self)
