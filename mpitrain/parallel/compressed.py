"""Sums of gradients by codes: which elements of a bucket are coded, and what their codes leave out.

A bucket's matrices are coded; vectors and small tensors, a thousandth of the bytes, travel as they
are, at the same time.  What a step's codes leave out is added to the next step's gradients (error
feedback), and is kept only if the step counts: where a gradient of any rank is not finite, or the
loss scale is too large, the ranks skip the step together, and the residuals are as if it had not
been.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import numpy as np

from collectives.codec import Dice, Memory, Residual
from collectives.coded import Gathered, Part, Phased, TwoPhase
from collectives.communicator import Communicator
from mpitrain.arrays import Array, Shape
from mpitrain.compress import AnyCodec, Linear, Momentum, Remembering, Sketch, Sparse
from mpitrain.compress.memory import UpdateResidual
from mpitrain.config import ConfigError
from mpitrain.parallel.arena import DATA, Arena
from mpitrain.parallel.linear_sum import LinearSum
from mpitrain.parallel.node_sum import NodeSum
from mpitrain.parallel.packing import Packed, Together
from mpitrain.parallel.sparse_sum import SparseSum
from mpitrain.parallel.summation import Dense, Kept, Sum, Summand


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
        every: steps from one sum to the next.
        updates: what codes leave out is kept as what the weights lack, times the learning rate.
        nodes: one rank of each node codes its node's sum.
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
        """Whether the ranks average in the sum of this step, counted from 0: in the first one after
        each ``flush_every`` steps."""
        done, often = step + 1, self.flush_every
        return often > 0 and done // often != (done - self.every) // often

    @property
    def votes(self) -> bool:
        """Whether what comes out is no sum, so that all gradients must be coded."""
        return getattr(self.code, "votes", False)

    def codes(self, shape: Shape) -> bool:
        """Whether the gradients of a tensor are coded."""
        return self.votes or (len(shape) > 1 and prod(shape) >= self.least)

    def gathers(self, ranks: int) -> bool:
        """Whether codes of a ``Codec`` are gathered, not added by owners."""
        by_itself = self.exchange == "auto" and ranks == 2 and not self.votes
        return self.exchange == "gathered" or by_itself


@dataclass
class Compressed:
    """A :class:`~mpitrain.parallel.summation.Summation` by codes.

    Sums of other groups of ranks than the replicas stay dense: what pipeline stages or tensor ranks
    hold together must stay exactly equal.

    Attributes:
        dice: whose step is that of the run.
        exchanges: the sums that were bound and not freed, those that are coded or keep something.
        tells: all ranks hear where the gradients of one are not finite, and the sum is not, either;
            without, who calls must see to it (:attr:`is_finite`).
        anew: sums are bound in each backward pass, and run once: they keep nothing.
        scale: that the gradients of this step were multiplied by.
        rate: learning rate of this step.
        share: what this rank's are multiplied by before they are coded, see :meth:`prepare`.
    """

    compression: Compression
    dice: Dice
    dense: Dense
    exchanges: "list[Exchange | NodeSum]" = field(default_factory=list)
    tells: bool = False
    anew: bool = False
    scale: float = field(default=1.0, init=False)
    rate: float = field(default=1.0, init=False)
    share: float = field(default=1.0, init=False)
    acts_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._has_begun = False
        #: Whether the gradients were finite of sums that are freed.
        self._were_finite = True
        #: How often the sum of a bucket was bound in this step.
        self._bound: Counter[int] = Counter()

    def check(self, arena: Arena) -> None:
        """Whether it can sum what must be summed exactly; not collective.

        Raises:
            ConfigError: the code votes, and some gradients are those of more than the replicas.
        """
        exact = [tensor.name for tensor in arena.tensors if tensor.group != DATA]
        if self.compression.votes and exact:
            raise ConfigError(
                f"compress.codec: {self.compression.code} has no sums, and {', '.join(exact[:3])} "
                "are summed over other ranks than the replicas; set another codec"
            )

    def bind(self, summand: Summand) -> Sum:
        """The sum of these arrays; collective over ``summand.comm``."""
        how, is_data = self.compression, summand.bucket.group == DATA
        if self.anew and self._has_begun and self.dice.step < how.start:
            return self.dense.bind(summand)
        packed = Packed(summand, lambda shape: is_data and how.codes(shape), tells=self.tells)
        if not packed.coded.size and not isinstance(how.code, Momentum):
            return self.dense.bind(summand)
        if how.nodes:
            return NodeSum(summand, packed, self)
        return self.exchange(summand, packed)

    def exchange(self, summand: Summand, packed: Packed) -> "Exchange":
        """By codes of each rank of ``summand.comm``; collective."""
        turn = self._bound[summand.bucket.start]
        self._bound[summand.bucket.start] += 1
        exchange = Exchange(summand, packed, self, turn)
        self.exchanges.append(exchange)
        return exchange

    def residual(self, value: Array) -> Residual:
        """What codes leave out; ``value``: memory of it."""
        return (
            UpdateResidual(value, lambda: self.rate)
            if self.compression.updates
            else Residual(value)
        )

    def forget(self, exchange: "Exchange | NodeSum") -> None:
        """It was freed."""
        self._were_finite = self.is_finite
        self.exchanges.remove(exchange)

    def begin(self, step: int, scale: float, rate: float = 1.0) -> None:
        """The gradients of ``step``, counted from 0, come multiplied by ``scale``, and go into an
        update of this learning rate."""
        self.dice.step, self.scale, self.rate, self.share = step, scale, rate, 1.0
        self._has_begun = self._were_finite = True
        self._bound.clear()
        for exchange in self.exchanges:
            exchange.is_finite = True

    @property
    def needs_all(self) -> bool:
        """Whether the first sum may begin only when all gradients of this rank are there."""
        code = self.compression.code
        return isinstance(code, Momentum) and code.clip > 0

    def prepare(self, gradients: Array, ranks: int) -> None:
        """All ``gradients`` of this rank, one of ``ranks`` that are summed, are there."""
        code = self.compression.code
        if isinstance(code, Momentum) and code.clip:
            # Of what is not finite nothing is sent.
            squares = float(np.square(gradients, dtype=np.float64).sum())
            self.share = code.share(squares / self.scale**2, ranks)

    @property
    def is_finite(self) -> bool:
        """Whether all gradients of this rank that were coded in this step were."""
        return self._were_finite and all(exchange.is_finite for exchange in self.exchanges)

    def commit(self) -> None:
        """The step counts."""
        for exchange in self.exchanges:
            exchange.commit()

    def rollback(self) -> None:
        """The step is skipped."""
        for exchange in self.exchanges:
            exchange.rollback()

    def kept(self) -> Iterator[Kept]:
        """What codes have left out."""
        return (kept for exchange in self.exchanges for kept in exchange.kept())

    def state(self) -> Mapping[str, Array]:
        """What ``Linear`` codes keep."""
        return {k: array for one in self.exchanges for k, array in one.state().items()}


class Exchange(Phased):
    """The sum of one bucket, its matrices by codes.

    Attributes:
        packed: which elements are coded.
        memory: what this rank keeps of its own gradients, as what codes left out; shape of each of
            its arrays (coded elements,).
        rest_memory: what all ranks keep of sums that are not coded, as a momentum.
        owner_residual: what the codes of sums left out, shape (elements of the own shard,).
        is_finite: whether the gradients of this step are.
    """

    def __init__(
        self, summand: Summand, packed: Packed, made_by: Compressed, turn: int = 0
    ) -> None:
        """Bind it; collective.  ``turn``: how many sums of the bucket this step has had."""
        self.packed, self.is_finite = packed, True
        self._summand, self._made_by = summand, made_by
        # A bucket has fewer elements than that: each turn has dice of its own.
        self._place = summand.bucket.start + (turn << 40)
        how, comm = made_by.compression, summand.comm
        self.memory: Memory | None = None
        self.rest_memory: Memory | None = None
        if isinstance(how.code, Remembering):
            self.memory = how.code.memory(np.zeros_like(packed.coded))
            if isinstance(how.code, Momentum):
                self.rest_memory = how.code.of_sum(np.zeros_like(packed.rest_sum))
        elif how.feedback:
            self.memory = self._made_by.residual(np.zeros_like(packed.coded))
        self.owner_residual: Residual | None = None
        self._coded = self._sum(how, comm) if packed.coded.size else None
        self.algorithm = self._coded.algorithm if self._coded else str(how.code)
        self.reason = f"{packed.share:.0%} of elements"
        self._rest = packed.bind_rest(comm)
        self._dense = made_by.dense.bind(summand) if how.start and not made_by.anew else None
        super().__init__(comm, [])

    def _sum(self, how: Compression, comm: Communicator) -> Phased:
        """The sum of what is coded, as the kind of the code asks for."""
        code, packed, dice, memory = how.code, self.packed, self._made_by.dice, self.memory
        if isinstance(code, Linear):
            flushes = how.flushes if how.flush_every else None
            return LinearSum(comm, code, packed, memory, dice, flushes)
        if isinstance(code, Sparse):
            return SparseSum(comm, code, packed, memory, dice)
        place, total = self._place, packed.coded_total
        if how.gathers(comm.size) and packed.coded_counts is None:
            return Gathered(
                comm, code, packed.coded, total, residual=memory, dice=dice, place=place
            )
        if how.feedback and packed.coded_counts is None:
            own = packed.part.stop - packed.part.start
            self.owner_residual = self._made_by.residual(np.zeros(own, total.dtype))
        return TwoPhase(
            comm,
            code,
            packed.coded,
            total,
            packed.coded_counts,
            residual=memory,
            owner_residual=self.owner_residual,
            dice=dice,
            place=place,
            lasts=not self._made_by.anew,
        )

    @property
    def encoded(self) -> int:
        """Bytes of the code of this rank's gradients, and of those that are not coded."""
        code, packed = self._made_by.compression.code, self.packed
        if isinstance(self._coded, LinearSum | SparseSum):
            return self._coded.encoded + packed.rest.nbytes
        assert not isinstance(code, Linear | Sparse), "these have sums of their own"
        return code.nbytes(packed.coded.size) + packed.rest.nbytes

    def phases(self) -> Iterator[Part]:
        if self._dense is not None and self._made_by.dice.step < self._made_by.compression.start:
            yield self._dense
            return
        scale, rest = self._made_by.scale, self._rest
        self.is_finite = self.packed.pack(scale, self._made_by.share)
        for plan in self._coded.phases() if self._coded else ():
            yield Together([plan, rest]) if rest else plan
            rest = None
        if rest:
            yield rest
        self.is_finite = self.packed.all_finite(self.is_finite)
        if self.rest_memory:
            self.rest_memory.add_to(self.packed.rest_sum)
        self.packed.unpack(scale, self.is_finite)

    def commit(self) -> None:
        """The step counts."""
        for one in self._remembering:
            one.commit()

    def rollback(self) -> None:
        """The step is skipped."""
        for one in self._remembering:
            one.rollback()

    @property
    def _remembering(self) -> Iterator[Memory | Sketch]:
        yield from filter(None, (self.memory, self.rest_memory, self.owner_residual))
        if isinstance(self._coded, LinearSum):
            yield self._coded.sketch

    def kept(self) -> Iterator[Kept]:
        """What is kept of the elements, as elements of the arena."""
        packed, alone = self.packed, "" if self.owner_residual else "owner"
        for name, values in self.memory.arrays.items() if self.memory else ():
            part = slice(0, values.size)
            yield from packed.kept(
                name, values, part, coded=True, is_per_replica=True, when_alone=alone
            )
        for name, values in self.rest_memory.arrays.items() if self.rest_memory else ():
            yield from packed.kept(
                name, values, packed.rest_shard, coded=False, is_per_replica=False, is_shared=True
            )
        if self.owner_residual:
            value = self.owner_residual.value
            yield from packed.kept("owner", value, packed.part, coded=True, is_per_replica=False)

    def state(self) -> Mapping[str, Array]:
        """What the code keeps, if it is ``Linear``."""
        return self._coded.sketch.state if isinstance(self._coded, LinearSum) else {}

    def Free(self) -> None:
        super().Free()
        for plan in (self._coded, self._rest, self._dense):
            if plan is not None:
                plan.Free()
        self._made_by.forget(self)
