"""Data parallelism: each replica keeps all gradients, and sums them bucket by bucket."""

from collections.abc import Callable, Sequence

from mpitrain.arrays import Array, Gradients
from mpitrain.group import share
from mpitrain.parallel.arena import DATA, Arena, Bucket
from mpitrain.parallel.store import Allocate, Piece, Reduction, Store, zero_others
from mpitrain.parallel.summation import Sum, SumsInFlight


class WholeGradients(Store):
    """Gradients in a flat array; the sum of each bucket is bound once.

    A bucket's sum starts when all of its layers are :meth:`ready`, in the same order on all ranks.

    Attributes:
        gradients: flat array in the arena's layout.
        starts_early: whether sums start while layers below are still to be computed.
        beside: moves other communication along.
    """

    def __init__(self, arena: Arena, reduction: Reduction, gradients: Array) -> None:
        """``gradients``: memory for the gradients, which becomes the store's."""
        super().__init__(arena, reduction, reduction.bucket_bytes, gradients.itemsize)
        self.gradients = gradients
        self.gradients[...] = 0
        self._totals = arena.views(gradients)
        self._tensors = [arena.inside(b, gradients[b.start : b.stop]) for b in self.buckets]
        self._sums: dict[Bucket, Sum] = {}
        self._in_flight = SumsInFlight(self.buckets)
        self.beside: Callable[[], None] = lambda: None
        self._ready: set[int] = set()
        self._started = 0
        self.starts_early = reduction.overlap and not reduction.summation.needs_all

    def bind_sums(self, shards: Sequence[Array] = ()) -> None:
        """Bind the sum of each bucket; collective.

        ``shards``: memory of the own shard of each bucket's sum; without, sums replace gradients.
        """
        for index, bucket in enumerate(self.buckets):
            if shards or self.comm(bucket).size > 1 or self.reduction.summation.acts_alone:
                own = self.gradients[bucket.start : bucket.stop]
                self._sums[bucket] = self.bind(bucket, own, shards[index] if shards else None)
        self.describe(self._sums)

    def accumulate(self, layer: int, gradients: Gradients) -> None:
        self.add(layer, gradients, self._totals[layer], self.used)

    def ready(self, layer: int) -> None:
        self._ready.add(layer)
        if self.starts_early:
            self._start()

    def progress(self) -> None:
        self._in_flight.progress()
        self.beside()

    def wait(self) -> float:
        summation = self.reduction.summation
        if summation.needs_all:
            for tensors in self._tensors:
                zero_others(tensors, self.used)
            summation.prepare(self.gradients, self.reduction.groups[DATA].size)
        self._ready.update(*(bucket.layers for bucket in self.buckets))
        self._start()
        seconds = self._in_flight.wait()
        self._ready.clear()
        self._started = 0
        return seconds

    def close(self) -> None:
        super().close()
        while self._sums:
            self._sums.popitem()[1].Free()

    def _start(self) -> None:
        for bucket in self.buckets[self._started :]:
            if not bucket.layers <= self._ready:
                return
            zero_others(self._tensors[self._started], self.used)
            if bucket in self._sums:
                self._in_flight.start(bucket, self._sums[bucket])
            self._started += 1


class Replicated(WholeGradients):
    """Parameters and gradients whole; each bucket's sum replaces the gradients.

    Cost a step: an all-reduce of the gradients.  The result is bitwise the same on every replica.

    Attributes:
        parameters: flat array in the arena's layout.
    """

    is_replicated = True

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the all-reduces; collective.

        Args:
            arena: layout of the parameters.
            initial: flat parameters, which become the store's.
            reduction: how gradients are summed.
            allocate: makes the gradients' array, as ``Communicator.empty``, which puts it where a
                node's ranks reduce it without messages.
        """
        super().__init__(arena, reduction, allocate(arena.size, initial.dtype))
        self.parameters = initial
        self.views = arena.views(self.parameters)
        for b in self.buckets:
            own = slice(b.start, b.stop)
            self.pieces.append(Piece(b.start, self.parameters[own], self.gradients[own], b.group))
        self.bind_sums()

    def owned(self, piece: Piece) -> slice:
        # The replicas hold the same numbers: each takes its share of the work.
        comm = self.reduction.groups[piece.group]
        return share(piece.parameters.size, comm.rank, comm.size)
