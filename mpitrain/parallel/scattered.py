"""Stores that keep a shard of the gradients, into which each backward pass is summed at once."""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from collectives.execution.waiting import give_way
from mpitrain.arrays import Array, Gradients, array_namespace
from mpitrain.parallel.arena import Arena, Bucket
from mpitrain.parallel.store import Reduction, Store
from mpitrain.parallel.summation import Sum, arrived


class _Arriving(NamedTuple):
    """The sum of a bucket's gradients of one backward pass, on its way."""

    bucket: Bucket
    its_sum: Sum
    shard: Array


class ScatteredGradients(Store):
    """The own shards of the gradients.

    Buckets are single layers, so that no more than a few of them are whole at a time: a layer's
    gradients are summed over the ranks once a backward pass has written all of its bucket, and what
    arrives is added to the shard.

    Attributes:
        seconds: spent in communication since the last :meth:`wait`.
    """

    def __init__(self, arena: Arena, reduction: Reduction, itemsize: int) -> None:
        super().__init__(arena, reduction, 1, itemsize)
        self.seconds = 0.0
        self._partial: dict[Bucket, tuple[Array, set[int]]] = {}
        self._arriving: list[_Arriving] = []

    def describe_sums(self, like: Array) -> None:
        """Say how the largest bucket of gradients is summed; collective.

        Args:
            like: an array of the gradients' type and kind of memory.
        """
        xp = array_namespace(like)
        largest = max(self.buckets, key=lambda bucket: bucket.stop - bucket.start, default=None)
        # Ranks of other stages share some buckets, and may have another largest: bind every one.
        for bucket in self.buckets:
            own = self.own(bucket)
            whole = xp.empty(bucket.stop - bucket.start, like.dtype)
            its_sum = self.bind(bucket, whole, xp.empty(own.stop - own.start, like.dtype))
            if bucket is largest:
                self.describe({bucket: its_sum})
            its_sum.Free()

    def accumulate(self, layer: int, gradients: Gradients) -> None:
        self.note_used(layer, gradients)
        for bucket in self.buckets:
            if layer in bucket.layers:
                flat, seen = self._partial.get(bucket) or self._fresh(bucket)
                for name, total in self.arena.within(layer, bucket, flat).items():
                    if (gradient := gradients[name]) is not None:
                        total += gradient
                seen.add(layer)
                if seen == bucket.layers:
                    self._begin(bucket)
        self.progress()

    def progress(self) -> None:
        self._move(lambda its_sum: its_sum.Test())

    def _move(self, is_done: Callable[[Sum], bool]) -> None:
        start = perf_counter()
        left: list[_Arriving] = []
        # The sums of one bucket are added in the order of the backward passes, on every run.
        late: set[Bucket] = set()
        for arriving in self._arriving:
            if arriving.bucket in late or not is_done(arriving.its_sum):
                late.add(arriving.bucket)
                left.append(arriving)
            else:
                self._add(arriving)
        self._arriving = left
        self.seconds += perf_counter() - start

    def wait(self) -> float:
        for bucket in [b for b in self.buckets if b in self._partial]:
            self._begin(bucket)
        while self._arriving:
            self._move(arrived)
            give_way()
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _fresh(self, bucket: Bucket) -> tuple[Array, set[int]]:
        like = self.pieces[0].parameters
        flat = array_namespace(like).zeros(bucket.stop - bucket.start, like.dtype)
        self._partial[bucket] = flat, set[int]()
        return self._partial[bucket]

    def _begin(self, bucket: Bucket) -> None:
        start = perf_counter()
        whole, _ = self._partial.pop(bucket)
        size = self.pieces[self.buckets.index(bucket)].gradients.size
        shard = array_namespace(whole).empty(size, whole.dtype)
        its_sum = self.bind(bucket, whole, shard)
        its_sum.Start()
        self._arriving.append(_Arriving(bucket, its_sum, shard))
        self.seconds += perf_counter() - start

    def _add(self, arriving: _Arriving) -> None:
        arriving.its_sum.Free()
        total = self.pieces[self.buckets.index(arriving.bucket)].gradients
        total += arriving.shard
