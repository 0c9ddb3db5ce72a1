"""Sums of gradients over ranks, for every store.

A store describes a bucket's gradients and the memory of their sum in a :class:`Summand`, of which a
:class:`Summation` makes a :class:`Sum`.  When the layers of a bucket are ready, the store gives
this to :class:`SumsInFlight`, which starts it and moves it along: see ``ready`` and ``wait`` of
:mod:`~mpitrain.parallel.data_parallel`, and ``accumulate`` of :mod:`~mpitrain.parallel.zero`.

Another way of summing is another Summation.  Stores without whole gradients bind sums anew in each
backward pass, so that state is kept by bucket.  Buckets are complete in another order on each rank:
a second collective that ``Test`` starts needs a communicator of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, NamedTuple, Protocol

from mpi4py import MPI

from collectives import Communicator, CorruptMessage, give_way
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.parallel.arena import Bucket


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
        is_shared: whether all ranks that have an element keep the same value.
    """

    name: str
    start: int
    values: Array
    is_per_replica: bool
    is_shared: bool = False


class Summation(ABC):
    """A way of summing gradients over ranks; without overrides, it keeps nothing.

    Its state follows the steps that count: :meth:`begin`, the sums, then :meth:`commit` or
    :meth:`rollback`.

    Attributes:
        acts_alone: whether the sum over one rank differs from the rank's gradients.
        no_sum: key of the job, and why its result is no sum; empty: it is one.
        needs_all: whether the first sum may begin only when all gradients of this rank are there.
        is_finite: whether this rank's gradients of the step were finite, if their sum may not show
            it.
    """

    acts_alone: ClassVar[bool] = False

    @property
    def no_sum(self) -> str:
        return ""

    @property
    def needs_all(self) -> bool:
        return False

    @property
    def is_finite(self) -> bool:
        return True

    @abstractmethod
    def bind(self, summand: Summand) -> Sum:
        """The sum of these arrays, not started yet; collective over ``summand.comm``."""

    def begin(self, step: int, scale: float) -> None:  # noqa: B027
        """Begin ``step``, counted from 0, whose gradients come multiplied by ``scale``."""

    def prepare(self, gradients: Array, ranks: int) -> None:  # noqa: B027
        """Look at all gradients of this rank, one of ``ranks``, if the sums :attr:`needs_all`."""

    def commit(self, factor: float = 1.0) -> None:  # noqa: B027
        """End a step that counts, whose update takes ``factor`` times the sum."""

    def rollback(self) -> None:  # noqa: B027
        """End a step that is skipped."""

    def kept(self) -> Iterator[KeptElements]:
        """Values kept for elements of the parameters, which a checkpoint must have."""
        return iter(())

    def state(self) -> Mapping[str, Array]:
        """Other arrays that a checkpoint must have, by name, the same on all replicas."""
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


def uncountable(step: int, who: str) -> ConfigError:
    """The error of a job that uses gradients before it can know what counts in their batch.

    ``step`` counts from 0; ``who``: subject and verb, such as ``"a server adds them"``.
    """
    return ConfigError(
        f"loss: not every label of step {step + 1} counts 1, and {who} before the ranks know what "
        "counts; change that setting, or give a mean over samples with equal weights"
    )


class _StartedSum(NamedTuple):
    bucket: Bucket
    its_sum: Sum
    complete: Callable[[], None]


class SumsInFlight:
    """Sums that were started and are not complete.

    MPI moves long messages only inside its calls: call :meth:`progress` as often as is cheap.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """``buckets``: the numbering of buckets in errors."""
        self._buckets = buckets
        self._started: list[_StartedSum] = []
        self._seconds = 0.0

    def start(
        self, bucket: Bucket, its_sum: Sum, complete: Callable[[], None] = lambda: None
    ) -> None:
        """Start a sum, in the same order on all ranks; ``complete`` is called at its end.

        Several sums of one bucket end in the order in which they were started.
        """
        with self.timed():
            its_sum.Start()
        self._started.append(_StartedSum(bucket, its_sum, complete))

    def progress(self) -> None:
        """Move all sums along without waiting."""
        if self._started:
            with self.timed():
                self._move(lambda its_sum: its_sum.Test())

    def wait(self) -> float:
        """Complete all sums; returns this rank's seconds in communication since the last call.

        CorruptMessage, which names the bucket: a message arrived changed, with checksums.
        """
        with self.timed():
            # In turns: buckets may be on different communicators, whose ranks wait for one another.
            while self._started:
                self._move(arrived)
                if self._started:
                    give_way()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of a block as communication."""
        start = perf_counter()
        yield
        self._seconds += perf_counter() - start

    def _move(self, is_done: Callable[[Sum], bool]) -> None:
        left: list[_StartedSum] = []
        late: set[int] = set()  # buckets with a sum that is not complete
        for one in self._started:
            if id(one.bucket) in late:
                left.append(one)
                continue
            try:
                done = is_done(one.its_sum)
            except CorruptMessage as error:
                number, layers = self._buckets.index(one.bucket), one.bucket.layers
                raise CorruptMessage(
                    f"bucket {number}, layers {min(layers)} to {max(layers)}: {error}"
                ) from error
            if done:
                one.complete()
            else:
                left.append(one)
                late.add(id(one.bucket))
        self._started = left
