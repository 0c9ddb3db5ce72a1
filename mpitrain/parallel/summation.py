"""Where the sum of a bucket's gradients over ranks begins, for every store.

A store says what is summed and where the sum goes, in a :class:`Summand`; a :class:`Summation` says
how, and makes a :class:`Sum`, which is started in each step.  Another way of summing is another
Summation.  It finds the bucket's tensors by name.  What it needs again in the next step it keeps by
bucket, for a store that keeps no whole gradients makes its sums anew in each backward pass.  A
second collective of a Sum, started in ``Test``, needs a communicator of its own: buckets are
complete in another order on each rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.parallel.arena import Arena, Bucket


@dataclass(frozen=True)
class Summand:
    """The gradients of a bucket on this rank, and where their sum over the ranks goes.

    Attributes:
        bucket: whose gradients; the same on all ranks.
        comm: the ranks.
        own: this rank's gradients, of shape (elements of the bucket,).
        tensors: the same memory as views, by the tensors' names in the model.
        total: memory of the sum: ``own`` itself, or an array of the own shard.
        counts: elements of the shard of each rank; None: each rank gets the sum of all elements.
    """

    bucket: Bucket
    comm: Communicator
    own: Array
    tensors: Mapping[str, Array]
    total: Array
    counts: Sequence[int] | None = None


class Sum(Protocol):
    """The sum of one bucket, run again and again; a plan of ``collectives`` is one.

    Attributes:
        algorithm, reason: how it is summed, and why so.
    """

    @property
    def algorithm(self) -> str: ...

    @property
    def reason(self) -> str: ...

    def Start(self) -> None:
        """Begin, from what ``own`` holds now; all ranks start their sums in the same order."""

    def Test(self) -> bool:
        """Move it along; true once the sum is in ``total``."""

    def Wait(self) -> None:
        """Complete it: the sum is in ``total``."""

    def Free(self) -> None:
        """Free what is bound to the communicator."""


def arrived(its_sum: Sum) -> bool:
    """Move it along; true once it is in ``total`` for all that the current stream does next.

    Unlike ``Test``, it does not wait for a device to come to the end of the sum.  While there is
    work to be queued that does not need the sum, ask ``Test``: this makes the stream wait for it.
    """
    if its_sum.Test():
        return True
    if getattr(its_sum, "is_only_queued", False):  # of a plan on a device
        its_sum.Wait()
        return True
    return False


@dataclass(frozen=True)
class Kept:
    """What a sum keeps from step to step of some elements, for checkpoints.

    Attributes:
        name: what it is.
        start: the first element, in the arena.
        values: shape (elements,), memory of it.
        is_per_replica: each replica has its own, and their sum counts; else each element is kept
            once, by one of them.
        when_alone: name of what else a replica keeps, on layouts where no rank keeps that.
        is_shared: all ranks that have an element keep the same of it.
    """

    name: str
    start: int
    values: Array
    is_per_replica: bool
    when_alone: str = ""
    is_shared: bool = False


class Keeper(Protocol):
    """Keeps something from step to step that a checkpoint must have."""

    def kept(self) -> Iterator[Kept]:
        """What is kept of elements of the parameters."""

    def state(self) -> Mapping[str, Array]:
        """What else is kept, the same on all replicas, by name."""


class Summation(Keeper, Protocol):
    """A way of summing gradients over ranks.

    What it keeps from step to step follows the steps that count: :meth:`begin`, the sums, then
    :meth:`commit` or :meth:`rollback`.

    Attributes:
        acts_alone: whether the sum over one rank is something else than what it has.
    """

    @property
    def acts_alone(self) -> bool: ...

    def check(self, arena: Arena) -> None:
        """Whether it can sum the gradients of these tensors as they must be; not collective.

        Raises:
            ConfigError: it cannot.
        """

    def bind(self, summand: Summand) -> Sum:
        """The sum of these arrays, not started yet; collective over ``summand.comm``."""

    def begin(self, step: int, scale: float, rate: float = 1.0) -> None:
        """The gradients of ``step``, counted from 0, come multiplied by ``scale``, and go into an
        update of this learning rate."""

    @property
    def needs_all(self) -> bool:
        """Whether the first sum may begin only when all gradients of this rank are there."""

    def prepare(self, gradients: Array, ranks: int) -> None:
        """All ``gradients`` of this rank, one of ``ranks`` that are summed, are there; before the
        sums begin, where these need all."""

    @property
    def is_finite(self) -> bool:
        """Whether this rank's gradients of the step were, where their sum may not show it."""

    def commit(self) -> None:
        """The step counts."""

    def rollback(self) -> None:
        """The step is skipped."""


class KeepsNothing:
    """The part of a :class:`Summation` that has no memory from step to step, and needs none."""

    acts_alone: ClassVar[bool] = False
    is_finite: ClassVar[bool] = True
    needs_all: ClassVar[bool] = False

    def begin(self, step: int, scale: float, rate: float = 1.0) -> None:
        """Nothing is kept."""

    def prepare(self, gradients: Array, ranks: int) -> None:
        """Nothing is to be known."""

    def commit(self) -> None:
        """Nothing is kept."""

    def rollback(self) -> None:
        """Nothing is kept."""

    def kept(self) -> Iterator[Kept]:
        """Nothing is kept."""
        return iter(())

    def state(self) -> Mapping[str, Array]:
        """Nothing is kept."""
        return {}


@dataclass(frozen=True)
class Dense(KeepsNothing):
    """Every number as it is, in one collective a bucket.

    Attributes:
        algorithm: as ``Communicator.Allreduce`` takes it.
    """

    algorithm: str = "auto"

    def check(self, arena: Arena) -> None:
        """It can."""

    def bind(self, summand: Summand) -> Sum:
        """An all-reduce in place, or a reduce-scatter."""
        comm, total = summand.comm, summand.total
        if summand.counts is None:
            return comm.Allreduce_init(MPI.IN_PLACE, total, algorithm=self.algorithm)
        return comm.Reduce_scatter_init(
            summand.own, total, list(summand.counts), algorithm=self.algorithm
        )
