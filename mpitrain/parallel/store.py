"""What holds a stage's parameters and gradients: a common face for every degree of sharding."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from collectives import Communicator
from mpitrain.arrays import Array, Gradients, Parameters
from mpitrain.group import share
from mpitrain.parallel.arena import Arena, Bucket, Tensor
from mpitrain.parallel.summation import Sum, Summand, Summation

#: Makes an array: ``allocate(size, dtype)``.
Allocate = Callable[..., Array]


@dataclass(frozen=True)
class Piece:
    """Elements ``start <= i < start + size`` of the arena, which this rank updates.

    Attributes:
        start: element index.
        parameters, gradients: one-dimensional; both are updated in place.
        group: as of the arena's tensors.
    """

    start: int
    parameters: Array
    gradients: Array
    group: str

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.parameters.size


def overlaps(
    tensors: tuple[Tensor, ...], piece: Piece, within: slice | None = None
) -> list[tuple[Tensor, slice]]:
    """The tensors that lie in a piece, or in ``within`` of it, and where in the piece they do."""
    low = piece.start + (within.start if within else 0)
    high = piece.start + (within.stop if within else piece.parameters.size)
    return [
        (
            tensor,
            slice(max(tensor.start, low) - piece.start, min(tensor.stop, high) - piece.start),
        )
        for tensor in tensors
        if max(tensor.start, low) < min(tensor.stop, high)
    ]


class Weights(Protocol):
    """What a forward or backward pass asks for a layer's parameters."""

    def take(self, layer: int) -> Parameters:
        """The parameters of a layer, until they are released."""

    def release(self, layer: int) -> None:
        """They are not used any more."""


class Sink(Protocol):
    """What takes gradients: a store."""

    def accumulate(self, layer: int, gradients: Gradients) -> None: ...
    def ready(self, layer: int) -> None: ...
    def progress(self) -> None: ...


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed.

    Attributes:
        groups: the ranks, for each group of the arena.
        summation: what sums the gradients of a bucket.
        bucket_bytes: least size of a bucket.
        overlap: start while layers below are still to be computed.
    """

    groups: Mapping[str, Communicator]
    summation: Summation
    bucket_bytes: int = 25 * 2**20
    overlap: bool = True


class Store(ABC):
    """Parameters and gradients of a stage, and the sum of the gradients over its replicas.

    A step is: :meth:`reset`; for each micro-batch :meth:`take` and :meth:`release` around each
    layer's forward and backward pass, and :meth:`accumulate`; :meth:`ready` after a layer's last;
    :meth:`wait`; the update of :attr:`pieces`; :meth:`publish`.

    Attributes:
        arena: the layout.
        pieces: what this rank updates; all ranks of a group together have each element once, or,
            if it is replicated, all of them.
        algorithm, reason: how the largest bucket is reduced, and why so.
        is_replicated: whether all ranks of a group hold, and update, the same.
        used: names of the tensors that had a part in the loss on this rank since the last
            :meth:`reset`.
    """

    pieces: Sequence[Piece]
    is_replicated = False

    def __init__(self, arena: Arena, reduction: Reduction, bucket_bytes: int, itemsize: int):
        self.arena = arena
        self.reduction = reduction
        self.buckets = arena.buckets(bucket_bytes, itemsize)
        self.used: set[str] = set()
        self.algorithm = "none"
        self.reason = "one replica"

    @abstractmethod
    def take(self, layer: int) -> Parameters:
        """The parameters of a layer, until they are released."""

    def release(self, layer: int) -> None:  # noqa: B027
        """They are not used any more."""

    def reset(self) -> None:
        """Gradients are 0."""
        self.used.clear()
        for piece in self.pieces:
            piece.gradients[...] = 0

    def set_overlap(self, on: bool) -> bool:
        """From the next step on; whether there is anything that it makes a difference to."""
        return False

    @abstractmethod
    def accumulate(self, layer: int, gradients: Gradients) -> None:
        """Add the gradients of a layer, all of its parameters'; None is 0, and no use of it."""

    def note_used(self, layer: int, gradients: Gradients) -> None:
        """Which of a layer's parameters had a part in the loss."""
        for own, full in self.arena.names(layer).items():
            if gradients[own] is not None:
                self.used.add(full)

    def ready(self, layer: int) -> None:  # noqa: B027
        """The last gradients of the layer in this step have been accumulated."""

    @abstractmethod
    def progress(self) -> None:
        """Move communication along."""

    @abstractmethod
    def wait(self) -> float:
        """Gradients of the pieces are complete; returns seconds spent in communication."""

    def publish(self) -> float:
        """The pieces' parameters have changed; returns seconds spent in communication."""
        return 0.0

    def counted(self, piece: Piece) -> slice:
        """The part of a piece that this rank answers for; a group's ranks have each element once.

        Norms and checkpoints take it from here.
        """
        return slice(0, piece.parameters.size)

    def close(self) -> None:  # noqa: B027
        """Free what is bound to communicators; collective."""

    def comm(self, bucket: Bucket) -> Communicator:
        """The ranks that sum the bucket, and among which its shards are dealt out."""
        return self.reduction.groups[bucket.group]

    def counts(self, bucket: Bucket) -> list[int]:
        """Elements of the bucket in the shard of each of these ranks."""
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
        """The sum of the bucket's gradients over its ranks: the one place where it is made.

        Args:
            bucket: whose.
            own: gradients of this rank, of shape (elements of the bucket,).
            shard: memory of the own shard of the sum; None: the sum replaces ``own``.
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
