"""ZeRO (Rajbhandari et al. 2020): each replica updates a shard, and holds no more than it must.

| level | optimiser state | gradients | parameters | bytes sent a step, of s bytes of parameters |
| ----- | --------------- | --------- | ---------- | ------------------------------------------- |
| 1     | shard           | whole     | whole      | reduce-scatter s, all-gather s              |
| 2     | shard           | shard     | whole      | reduce-scatter s a micro-batch, all-gather s |
| 3     | shard           | shard     | shard      | the same, all-gather 2 s a micro-batch      |
"""

from collections.abc import Sequence
from os import sched_yield
from time import perf_counter
from typing import Any

from mpi4py import MPI

from collectives.communicator import AnyPlan
from mpitrain.arena import COPIES, DATA, SUMMED, Arena, Bucket
from mpitrain.arrays import Array, Parameters, array_namespace
from mpitrain.parallel.store import Allocate, Piece, Reduction, Store


class ShardedOptimizer(Store):
    """ZeRO-1: whole gradients, of which a reduce-scatter leaves the own shard.

    Attributes:
        parameters, gradients: flat arrays in the arena's layout.
    """

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as those of ``Replicated``."""
        super().__init__(arena, reduction, reduction.bucket_bytes, initial.itemsize)
        self.parameters = allocate(arena.size, initial.dtype)
        self.parameters[...] = initial
        self.gradients = allocate(arena.size, initial.dtype)
        self.gradients[...] = 0
        self._views = arena.views(self.parameters)
        self._sums = arena.views(self.gradients)
        self.pieces = _pieces(self, self.parameters)
        self._plans = {
            bucket: self.comm(bucket).Reduce_scatter_init(
                self.gradients[bucket.start : bucket.stop],
                piece.gradients,
                self.counts(bucket),
                algorithm=reduction.algorithm,
            )
            for bucket, piece in zip(self.buckets, self.pieces)
        }
        self._gathers = _gathers(self, self.buckets, self.parameters)
        self.describe(self._plans)

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def reset(self) -> None:
        self.gradients[...] = 0

    def accumulate(self, layer: int, gradients: Parameters) -> None:
        for name, total in self._sums[layer].items():
            total += gradients[name]

    def publish(self) -> float:
        return _run(self._gathers)

    def close(self) -> None:
        while self._plans:
            self._plans.popitem()[1].Free()
        while self._gathers:
            self._gathers.pop().Free()

    def _start(self, bucket: Bucket) -> Any:
        plan = self._plans[bucket]
        plan.Start()
        return plan


class ShardedGradients(Store):
    """ZeRO-2: a layer's gradients are summed into the shards as soon as a backward pass has them.

    Buckets are single layers, so that no more than a few of them are whole at a time.

    Attributes:
        parameters: flat array in the arena's layout.
    """

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as those of ``Replicated``."""
        super().__init__(arena, reduction, 1, initial.itemsize)
        self.parameters = allocate(arena.size, initial.dtype)
        self.parameters[...] = initial
        self._views = arena.views(self.parameters)
        self.pieces = _pieces(self, self.parameters)
        self._gathers = _gathers(self, self.buckets, self.parameters)
        self._sums = _Sums(self)
        self.describe(dict(zip(self.buckets, self._gathers)))

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def accumulate(self, layer: int, gradients: Parameters) -> None:
        self._sums.accumulate(layer, gradients)

    def progress(self) -> None:
        self._sums.progress()

    def wait(self) -> float:
        super().wait()
        return self._sums.wait()

    def publish(self) -> float:
        return _run(self._gathers)

    def close(self) -> None:
        while self._gathers:
            self._gathers.pop().Free()

    def _start(self, bucket: Bucket) -> Any:
        return None  # it was, when its layer was accumulated


class ShardedParameters(ShardedGradients):
    """ZeRO-3: a layer's parameters are gathered for a pass through it, and forgotten after it.

    What several pipeline stages share stays whole: they do not pass through it together.
    """

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as those of ``Replicated``."""
        Store.__init__(self, arena, reduction, 1, initial.itemsize)
        self.algorithm = "reduce_scatter and allgather"
        self.reason = "of a layer at a time"
        self._sums = _Sums(self)
        self._whole: dict[Bucket, tuple[Array, int]] = {}
        self.pieces = []
        resident = []
        for bucket in self.buckets:
            values = array_namespace(initial).array(initial[bucket.start : bucket.stop])
            part = slice(
                self.own(bucket).start - bucket.start, self.own(bucket).stop - bucket.start
            )
            if bucket.group in (DATA, COPIES, SUMMED):
                shard = values[part].copy()
            else:
                self._whole[bucket] = (values, 1)
                shard = values[part]
                resident.append(bucket)
            gradients = array_namespace(initial).zeros_like(shard)
            self.pieces.append(Piece(self.own(bucket).start, shard, gradients, bucket.group))
        self._gathers = [
            self.comm(bucket).Allgatherv_init(
                MPI.IN_PLACE, [self._whole[bucket][0], self.counts(bucket)]
            )
            for bucket in resident
        ]
        self._by_layer = [
            [(b, p) for b, p in zip(self.buckets, self.pieces) if layer in b.layers]
            for layer in range(1 + max((max(b.layers) for b in self.buckets), default=-1))
        ]

    def take(self, layer: int) -> Parameters:
        parameters: dict[str, Array] = {}
        for bucket, piece in self._by_layer[layer] if layer < len(self._by_layer) else ():
            flat, users = self._whole.get(bucket, (None, 0))
            if flat is None:
                flat = self._gather(bucket, piece)
            self._whole[bucket] = (flat, users + 1)
            parameters |= self.arena.within(layer, bucket, flat)
        return parameters

    def release(self, layer: int) -> None:
        for bucket, _ in self._by_layer[layer] if layer < len(self._by_layer) else ():
            flat, users = self._whole.pop(bucket)
            if users > 1:
                self._whole[bucket] = (flat, users - 1)

    def _gather(self, bucket: Bucket, piece: Piece) -> Array:
        start = perf_counter()
        comm, shard = self.comm(bucket), piece.parameters
        flat = array_namespace(shard).empty(bucket.stop - bucket.start, shard.dtype)
        comm.Allgatherv(shard, [flat, self.counts(bucket)])
        self._sums.seconds += perf_counter() - start
        return flat


class _Sums:
    """Gradients on their way from a backward pass into the shards of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seconds = 0.0
        self._partial: dict[Bucket, tuple[Array, set[int]]] = {}
        self._in_flight: list[tuple[AnyPlan, Array, Array]] = []

    def accumulate(self, layer: int, gradients: Parameters) -> None:
        for bucket in self.store.buckets:
            if layer in bucket.layers:
                flat, seen = self._partial.get(bucket) or self._fresh(bucket)
                for name, total in self.store.arena.within(layer, bucket, flat).items():
                    total += gradients[name]
                seen.add(layer)
                if seen == bucket.layers:
                    self._begin(bucket)
        self.progress()

    def progress(self) -> None:
        start = perf_counter()
        self._in_flight = [flight for flight in self._in_flight if not self._arrived(*flight)]
        self.seconds += perf_counter() - start

    def wait(self) -> float:
        """All has arrived; returns the seconds spent since the last wait."""
        for bucket in [b for b in self.store.buckets if b in self._partial]:
            self._begin(bucket)
        while self._in_flight:
            self.progress()
            sched_yield()
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _fresh(self, bucket: Bucket) -> tuple[Array, set[int]]:
        like = self.store.pieces[0].parameters
        flat = array_namespace(like).zeros(bucket.stop - bucket.start, like.dtype)
        self._partial[bucket] = flat, set[int]()
        return self._partial[bucket]

    def _begin(self, bucket: Bucket) -> None:
        start = perf_counter()
        whole, _ = self._partial.pop(bucket)
        piece = self.store.pieces[self.store.buckets.index(bucket)]
        arriving = array_namespace(whole).empty(piece.gradients.size, whole.dtype)
        plan = self.store.comm(bucket).Ireduce_scatter(whole, arriving, self.store.counts(bucket))
        self._in_flight.append((plan, arriving, piece.gradients))
        self.seconds += perf_counter() - start

    def _arrived(self, plan: AnyPlan, arriving: Array, total: Array) -> bool:
        if not plan.Test():
            return False
        total += arriving
        return True


def _pieces(store: Store, parameters: Array) -> list[Piece]:
    xp = array_namespace(parameters)
    own = [(store.own(bucket), bucket) for bucket in store.buckets]
    return [
        Piece(
            part.start,
            parameters[part],
            xp.zeros(part.stop - part.start, parameters.dtype),
            bucket.group,
        )
        for part, bucket in own
    ]


def _gathers(store: Store, buckets: Sequence[Bucket], parameters: Array) -> list[AnyPlan]:
    return [
        store.comm(bucket).Allgatherv_init(
            MPI.IN_PLACE, [parameters[bucket.start : bucket.stop], store.counts(bucket)]
        )
        for bucket in buckets
    ]


def _run(plans: Sequence[AnyPlan]) -> float:
    start = perf_counter()
    for plan in plans:
        plan.Start()
    for plan in plans:
        plan.Wait()
    return perf_counter() - start
