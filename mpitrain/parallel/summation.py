"""The one place where sums of gradients over ranks are made, for every store.

A store describes the gradients and the memory of their sum in a :class:`Summand`; a
:class:`Summation` makes a :class:`Sum` of it, which is started in each step.  Another way of
summing is another Summation.  It finds the bucket's tensors by name.  State for the next step is
kept by bucket, because a store without whole gradients makes its sums anew in each backward pass.
A second collective of a Sum, started in ``Test``, needs a communicator of its own: buckets are
complete in another order on each rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.parallel.arena import Arena, Bucket


@dataclass(frozen=True)
class Summand:
    """The gradients of a bucket on this rank, and the memory of their sum over the ranks.

    Attributes:
        bucket: the bucket, the same on all ranks.
        comm: the ranks.
        own: this rank's gradients, of shape (elements of the bucket,).
        tensors: views of ``own``, by the tensors' names in the model.
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
        algorithm, reason: how the bucket is summed, and why so.
    """

    @property
    def algorithm(self) -> str: ...

    @property
    def reason(self) -> str: ...

    def Start(self) -> None:
        """Begin, from the present ``own``; all ranks start their sums in the same order."""

    def Test(self) -> bool:
        """Move the sum along; true once it is in ``total``."""

    def Wait(self) -> None:
        """Complete the sum in ``total``."""

    def Free(self) -> None:
        """Free what is bound to the communicator."""


def arrived(its_sum: Sum) -> bool:
    """Move a sum along; true once it is in ``total`` for later work on the current stream.

    Unlike ``Test``, it does not wait for a device to complete the sum.  Ask ``Test`` while there is
    work to queue that does not need the sum: this function makes the stream wait for it.
    """
    if its_sum.Test():
        return True
    if getattr(its_sum, "is_only_queued", False):  # a plan on a device
        its_sum.Wait()
        return True
    return False


@dataclass(frozen=True)
class KeptElements:
    """Values that a sum keeps from step to step for some elements; checkpoints save them.

    Attributes:
        name: kind of the values.
        start: the first element, in the arena.
        values: memory of the values, of shape (elements,).
        is_per_replica: whether each replica has its own values, whose sum counts; else each element
            is kept once, by one replica.
        when_alone: name of values that take these up on layouts where no rank keeps these.
        is_shared: whether all ranks that have an element keep the same value.
    """

    name: str
    start: int
    values: Array
    is_per_replica: bool
    when_alone: str = ""
    is_shared: bool = False


class Keeper(Protocol):
    """Owner of values that a checkpoint must have."""

    def kept(self) -> Iterator[KeptElements]:
        """Values kept for elements of the parameters."""

    def state(self) -> Mapping[str, Array]:
        """Other arrays, by name, the same on all replicas."""


class Summation(ABC):
    """A way of summing gradients over ranks; without overrides, it keeps nothing.

    Its state follows the steps that count: :meth:`begin`, the sums, then :meth:`commit` or
    :meth:`rollback`.

    Attributes:
        acts_alone: whether the sum over one rank differs from the rank's gradients.
    """

    acts_alone: ClassVar[bool] = False

    @property
    def needs_all(self) -> bool:
        """Whether the first sum may begin only when all gradients of this rank are there."""
        return False

    @property
    def is_finite(self) -> bool:
        """Whether this rank's gradients of the step were finite, if their sum may not show it."""
        return True

    def check(self, arena: Arena) -> None:  # noqa: B027
        """Check that the gradients of these tensors can be summed so; not collective.

        Raises:
            ConfigError: they cannot.
        """

    @abstractmethod
    def bind(self, summand: Summand) -> Sum:
        """The sum of these arrays, not started yet; collective over ``summand.comm``."""

    def begin(self, step: int, scale: float, rate: float = 1.0) -> None:  # noqa: B027
        """Begin ``step``, counted from 0, whose gradients come multiplied by ``scale``.

        They go into an update of this learning rate.
        """

    def prepare(self, gradients: Array, ranks: int) -> None:  # noqa: B027
        """Look at all gradients of this rank, one of ``ranks``, before the sums begin.

        Called if :attr:`needs_all`.
        """

    def commit(self) -> None:  # noqa: B027
        """End a step that counts."""

    def rollback(self) -> None:  # noqa: B027
        """End a step that is skipped."""

    def kept(self) -> Iterator[KeptElements]:
        """Values kept for elements of the parameters."""
        return iter(())

    def state(self) -> Mapping[str, Array]:
        """Other arrays, by name, the same on all replicas."""
        return {}


@dataclass(frozen=True)
class Dense(Summation):
    """Uncompressed sums, one collective a bucket.

    Attributes:
        algorithm: name for ``Communicator.Allreduce``.
    """

    algorithm: str = "auto"

    def bind(self, summand: Summand) -> Sum:
        """An all-reduce in place, or a reduce-scatter."""
        comm, total = summand.comm, summand.total
        if summand.counts is None:
            return comm.Allreduce_init(MPI.IN_PLACE, total, algorithm=self.algorithm)
        return comm.Reduce_scatter_init(
            summand.own, total, list(summand.counts), algorithm=self.algorithm
        )
