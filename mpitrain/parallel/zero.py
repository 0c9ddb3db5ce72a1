"""ZeRO (Rajbhandari et al. 2020): each replica updates a shard, and holds no more than it must.

| level | optimiser state | gradients | parameters | bytes sent a step, of s bytes of parameters |
| ----- | --------------- | --------- | ---------- | ------------------------------------------- |
| 1     | shard           | whole     | whole      | reduce-scatter s, all-gather s              |
| 2     | shard           | shard     | whole      | reduce-scatter s a micro-batch, all-gather s |
| 3     | shard           | shard     | shard      | the same, all-gather 2 s a micro-batch      |
"""

from collections.abc import Sequence
from time import perf_counter

from mpi4py import MPI

from collectives.communicator import AnyPlan
from mpitrain.arrays import Array, Parameters, array_namespace
from mpitrain.parallel.arena import COPIES, DATA, SUMMED, Arena, Bucket
from mpitrain.parallel.scattered import ScatteredGradients
from mpitrain.parallel.store import Allocate, Piece, Reduction, Store
from mpitrain.parallel.whole import WholeGradients


class ShardedOptimizer(WholeGradients):
    """ZeRO-1: whole gradients, of which a reduce-scatter leaves the own shard.

    Attributes:
        parameters: flat array in the arena's layout.
    """

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as those of ``Replicated``."""
        self.parameters = _copy(initial, allocate)
        super().__init__(arena, reduction, allocate(arena.size, initial.dtype))
        self._views = arena.views(self.parameters)
        self.pieces = _pieces(self, self.parameters)
        self.bind_sums([piece.gradients for piece in self.pieces])
        self._gathers = _gathers(self, self.buckets, self.parameters)

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def publish(self) -> float:
        return _run(self._gathers)

    def close(self) -> None:
        super().close()
        _free(self._gathers)


class ShardedGradients(ScatteredGradients):
    """ZeRO-2: a layer's gradients are summed into the shards as soon as a backward pass has them.

    Attributes:
        parameters: flat array in the arena's layout.
    """

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as those of ``Replicated``."""
        super().__init__(arena, reduction, initial.itemsize)
        self.parameters = _copy(initial, allocate)
        self._views = arena.views(self.parameters)
        self.pieces = _pieces(self, self.parameters)
        self._gathers = _gathers(self, self.buckets, self.parameters)
        self.describe_sums(initial)

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def publish(self) -> float:
        return _run(self._gathers)

    def close(self) -> None:
        _free(self._gathers)


class ShardedParameters(ScatteredGradients):
    """ZeRO-3: a layer's parameters are gathered for a pass through it, and forgotten after it.

    What several pipeline stages share stays whole: they do not pass through it together.
    """

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as those of ``Replicated``."""
        super().__init__(arena, reduction, initial.itemsize)
        self.algorithm = "reduce_scatter and allgather"
        self.reason = "of a layer at a time"
        self._whole: dict[Bucket, tuple[Array, int]] = {}
        self.pieces = []
        resident = []
        for bucket in self.buckets:
            values = array_namespace(initial).array(initial[bucket.start : bucket.stop])
            own = self.own(bucket)
            part = slice(own.start - bucket.start, own.stop - bucket.start)
            if bucket.group in (DATA, COPIES, SUMMED):
                shard = values[part].copy()
            else:
                self._whole[bucket] = (values, 1)
                shard = values[part]
                resident.append(bucket)
            gradients = array_namespace(initial).zeros_like(shard)
            self.pieces.append(Piece(own.start, shard, gradients, bucket.group))
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

    def publish(self) -> float:
        return _run(self._gathers)

    def close(self) -> None:
        _free(self._gathers)

    def _gather(self, bucket: Bucket, piece: Piece) -> Array:
        start = perf_counter()
        comm, shard = self.comm(bucket), piece.parameters
        flat = array_namespace(shard).empty(bucket.stop - bucket.start, shard.dtype)
        comm.Allgatherv(shard, [flat, self.counts(bucket)])
        self.seconds += perf_counter() - start
        return flat


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


def _copy(initial: Array, allocate: Allocate) -> Array:
    copy = allocate(initial.size, initial.dtype)
    copy[...] = initial
    return copy


def _run(plans: Sequence[AnyPlan]) -> float:
    start = perf_counter()
    for plan in plans:
        plan.Start()
    for plan in plans:
        plan.Wait()
    return perf_counter() - start


def _free(plans: list[AnyPlan]) -> None:
    while plans:
        plans.pop().Free()
