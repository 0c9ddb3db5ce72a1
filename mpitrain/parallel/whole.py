"""Stores that keep the gradients of all layers, and sum them bucket by bucket as they come."""

from collections.abc import Sequence

from mpitrain.arrays import Array, Gradients
from mpitrain.parallel.arena import DATA, Arena, Bucket
from mpitrain.parallel.buckets import BucketsInFlight
from mpitrain.parallel.store import Reduction, Store
from mpitrain.parallel.summation import Sum


class WholeGradients(Store):
    """Gradients in a flat array; the sum of each bucket is bound once.

    Attributes:
        gradients: in the arena's layout.
    """

    def __init__(self, arena: Arena, reduction: Reduction, gradients: Array) -> None:
        """``gradients``: memory for them, which becomes the store's."""
        super().__init__(arena, reduction, reduction.bucket_bytes, gradients.itemsize)
        self.gradients = gradients
        self.gradients[...] = 0
        self._totals = arena.views(gradients)
        self._sums: dict[Bucket, Sum] = {}
        overlap = reduction.overlap and not reduction.summation.needs_all
        self._in_flight = BucketsInFlight(self.buckets, self._sums, overlap=overlap)

    def bind_sums(self, shards: Sequence[Array] = ()) -> None:
        """Bind the sum of each bucket; collective.

        Args:
            shards: memory of the own shard of each bucket's sum; without them, the sums replace
                the gradients.
        """
        for index, bucket in enumerate(self.buckets):
            if shards or self.comm(bucket).size > 1 or self.reduction.summation.acts_alone:
                own = self.gradients[bucket.start : bucket.stop]
                self._sums[bucket] = self.bind(bucket, own, shards[index] if shards else None)
        self.describe(self._sums)

    def set_overlap(self, on: bool) -> bool:
        may = not self.reduction.summation.needs_all
        self._in_flight.overlap = on and may
        return bool(self._sums) and may

    def reset(self) -> None:
        self.used.clear()
        self.gradients[...] = 0

    def accumulate(self, layer: int, gradients: Gradients) -> None:
        self.note_used(layer, gradients)
        for name, total in self._totals[layer].items():
            if (gradient := gradients[name]) is not None:
                total += gradient

    def ready(self, layer: int) -> None:
        self._in_flight.ready(layer)

    def progress(self) -> None:
        self._in_flight.progress()

    def wait(self) -> float:
        summation = self.reduction.summation
        if summation.needs_all:
            summation.prepare(self.gradients, self.reduction.groups[DATA].size)
        return self._in_flight.wait()

    def close(self) -> None:
        while self._sums:
            self._sums.popitem()[1].Free()
