"""Stores of a stage's parameters and gradients: one interface for every degree of sharding."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from mpi4py import MPI

from collectives import Communicator
from collectives.communicator import AnyPlan
from mpitrain.arrays import Array, Gradients, Parameters, Scalar, array_namespace
from mpitrain.group import share
from mpitrain.kernels import square_sum
from mpitrain.parallel.arena import Arena, Bucket, Tensor
from mpitrain.parallel.summation import Sum, Summand, Summation

#: Makes an array: ``allocate(size, dtype)``.
Allocate = Callable[..., Array]


@dataclass(frozen=True)
class Piece:
    """Elements ``start <= i < start + size`` of the arena, which this rank updates.

    Attributes:
        start: element index.
        parameters, gradients: one-dimensional arrays, updated in place.
        group: group of the arena's tensors.
    """

    start: int
    parameters: Array
    gradients: Array
    group: str

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.parameters.size


def overlaps(
    tensors: tuple[Tensor, ...], piece: Piece, within: slice | None = None
) -> list[tuple[Tensor, slice]]:
    """Tensors that lie in a piece, or in ``within`` of it, and their elements of the piece."""
    low = piece.start + (within.start if within else 0)
    high = piece.start + (within.stop if within else piece.parameters.size)
    found = [(t, max(t.start, low), min(t.stop, high)) for t in tensors]
    return [(t, slice(a - piece.start, b - piece.start)) for t, a, b in found if a < b]


def zero_others(tensors: Parameters, known: Set[str]) -> None:
    """Set the tensors, by name, that are not ``known`` to 0."""
    for name in tensors.keys() - known:
        tensors[name][...] = 0


class Weights(Protocol):
    """Parameters for a forward or backward pass."""

    def take(self, layer: int, following: Sequence[int] = ()) -> Parameters:
        """The parameters of a layer, until they are released.

        ``following``: the layers that are taken after it, in order; what the next one needs may be
        on its way meanwhile.
        """

    def release(self, layer: int) -> None:
        """End the use of a layer's parameters."""


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed.

    Attributes:
        groups: ranks, for each group of the arena.
        summation: way of summing the gradients of a bucket.
        bucket_bytes: least size of a bucket.
        overlap: whether sums start while layers below are still to be computed.
        prefetch: whether parameters are gathered during the pass through the layer before.
    """

    groups: Mapping[str, Communicator]
    summation: Summation
    bucket_bytes: int = 25 * 2**20
    overlap: bool = True
    prefetch: bool = True


class Store(ABC):
    """Parameters and gradients of a stage, and the sum of the gradients over its replicas.

    A step is: :meth:`reset`; for each micro-batch :meth:`take` and :meth:`release` around each
    layer's forward and backward pass, and :meth:`accumulate`; :meth:`ready` after a layer's last;
    :meth:`wait`; the update of :attr:`pieces`; :meth:`publish`.

    Attributes:
        arena: layout of the parameters.
        buckets: buckets of the gradients, in the order in which their sums begin.
        pieces: elements that this rank updates; the ranks of a group together have each element
            once, or each rank has all, if the store is replicated.
        views: each layer's parameters by name, where all of them are in memory.
        algorithm, reason: how the largest bucket is reduced, and why so.
        is_replicated: whether all ranks of a group hold, and update, the same elements.
        used: names of the tensors that had a part in the loss on this rank since the last
            :meth:`reset`.
        squares: sum of the squares of each micro-batch's own gradients since then, if the store
            ``squares_parts``; else 0.
    """

    is_replicated = False
    squares_parts = False

    def __init__(self, arena: Arena, reduction: Reduction, bucket_bytes: int, itemsize: int):
        self.arena = arena
        self.reduction = reduction
        self.buckets = arena.buckets(bucket_bytes, itemsize)
        self.pieces: list[Piece] = []
        self.views: Sequence[Parameters] = ()
        self.used: set[str] = set()
        self.squares: Scalar = 0.0
        self._parts: dict[str, tuple[Array | None, int]] = {}
        self.algorithm = "none"
        self.reason = "one replica"
        self._gathers: list[AnyPlan] = []

    def take(self, layer: int, following: Sequence[int] = ()) -> Parameters:
        """As :meth:`Weights.take`."""
        return self.views[layer]

    def release(self, layer: int) -> None:  # noqa: B027
        """End the use of a layer's parameters."""

    def offload(self, allocate: Allocate) -> None:  # noqa: B027
        """Keep shards of parameters, and their gradients, where ``allocate`` puts them."""

    def reset(self) -> None:
        """Begin a step, in which the first gradients replace those of the step before."""
        self.used.clear()
        self.squares = 0.0

    @abstractmethod
    def accumulate(self, layer: int, gradients: Gradients) -> None:
        """Add the gradients of all of a layer's parameters; None counts as 0, and as no use."""

    def add(self, layer: int, gradients: Gradients, totals: Parameters, known: set[str]) -> None:
        """Add a layer's gradients to ``totals``; store those of tensors not yet ``known``."""
        names = self.arena.names(layer)
        for own, total in totals.items():
            if (gradient := gradients[own]) is not None:
                before = total if names[own] in known else 0  # which leaves no -0.0, either
                array_namespace(total).add(gradient, before, out=total)
                known.add(names[own])
            if self.squares_parts:
                self._square(names[own], gradient)

    def _square(self, name: str, gradient: Array | None) -> None:
        """Add the square of a tensor's gradient once all layers that have it gave their parts."""
        before, left = self._parts.pop(name, (None, len(self.arena.users[name])))
        if before is not None:
            gradient = before if gradient is None else before + gradient
        if left > 1:
            self._parts[name] = gradient, left - 1
        elif gradient is not None:
            self.squares = self.squares + square_sum(gradient.ravel())

    def ready(self, layer: int) -> None:  # noqa: B027
        """Say that the last gradients of the layer in this step have been accumulated."""

    @abstractmethod
    def progress(self) -> None:
        """Move communication along."""

    @abstractmethod
    def wait(self) -> float:
        """Complete the gradients of the pieces; returns seconds spent in communication."""

    def gather_at_publish(self, bucket: Bucket, values: Array) -> None:
        """Bind the all-gather of a bucket's parameters, in place, from the shards; collective."""
        plan = self.comm(bucket).Allgatherv_init(MPI.IN_PLACE, [values, self.counts(bucket)])
        self._gathers.append(plan)

    def publish(self) -> None:
        """Share the updated parameters of the pieces; collective."""
        for plan in self._gathers:
            plan.Start()
        for plan in self._gathers:
            plan.Wait()

    def owned(self, piece: Piece) -> slice:
        """Part of a piece that this rank counts in norms and saves in checkpoints.

        The ranks of a group together have each element once.
        """
        return slice(0, piece.parameters.size)

    def close(self) -> None:
        """Free what is bound to communicators; collective."""
        while self._gathers:
            self._gathers.pop().Free()

    def comm(self, bucket: Bucket) -> Communicator:
        """Ranks that sum the bucket, each of which has a shard of it."""
        return self.reduction.groups[bucket.group]

    def counts(self, bucket: Bucket) -> list[int]:
        """Elements of the bucket in the shard of each rank."""
        size = self.comm(bucket).size
        length = bucket.stop - bucket.start
        parts = [share(length, rank, size) for rank in range(size)]
        return [part.stop - part.start for part in parts]

    def own(self, bucket: Bucket) -> slice:
        """The own shard, as indices of the arena."""
        comm = self.comm(bucket)
        part = share(bucket.stop - bucket.start, comm.rank, comm.size)
        return slice(bucket.start + part.start, bucket.start + part.stop)

    def bind(self, bucket: Bucket, own: Array, shard: Array | None = None) -> Sum:
        """Make the sum of a bucket's gradients ``own`` over its ranks; collective.

        ``shard``: memory of the own shard of the sum; None: the sum replaces ``own``.
        """
        counts = None if shard is None else self.counts(bucket)
        total = own if shard is None else shard
        tensors = self.arena.inside(bucket, own)
        summand = Summand(bucket, self.comm(bucket), own, tensors, total, counts)
        return self.reduction.summation.bind(summand)

    def describe(self, plans: Mapping[Bucket, Any]) -> None:
        """Say how the largest bucket is reduced."""
        if plans:
            largest = max(plans, key=lambda bucket: bucket.stop - bucket.start)
            self.algorithm, self.reason = plans[largest].algorithm, plans[largest].reason
