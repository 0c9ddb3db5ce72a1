"""ZeRO (Rajbhandari et al. 2020): each replica updates a shard, and holds no more than it must.

| level | optimiser state | gradients | parameters | bytes sent a step, of s bytes of parameters |
| ----- | --------------- | --------- | ---------- | ------------------------------------------- |
| 1     | shard           | whole     | whole      | reduce-scatter s, all-gather s              |
| 2     | shard           | shard     | whole      | reduce-scatter s a micro-batch, all-gather s |
| 3     | shard           | shard     | shard      | the same, all-gather 2 s a micro-batch      |
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mpitrain.arrays import Array, Gradients, Parameters, array_namespace
from mpitrain.parallel.arena import COPIES, DATA, SPREAD, SUMMED, Arena, Bucket
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.parallel.store import Allocate, Piece, Reduction, Store, zero_others
from mpitrain.parallel.summation import Sum, SumsInFlight

#: Groups of ranks that have the same layers.
_OF_A_STAGE = DATA, COPIES, SPREAD, SUMMED


class ShardedOptimizer(WholeGradients):
    """ZeRO-1: whole gradients, of which a reduce-scatter leaves the own shard."""

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as for ``Replicated``."""
        parameters = _copy(initial, allocate)
        super().__init__(arena, reduction, allocate(arena.size, initial.dtype))
        _hold_whole(self, parameters)
        self.bind_sums([piece.gradients for piece in self.pieces])


class ScatteredGradients(Store):
    """Own shards of the gradients, into which the sum of each backward pass is added.

    Buckets are single layers, so that few of them are whole at a time: the sum over the ranks
    starts once a backward pass has written all layers of a bucket.  Stages write what they share in
    other numbers of passes, and sum it once a step.
    """

    def __init__(self, arena: Arena, reduction: Reduction, itemsize: int) -> None:
        """Find the buckets that are summed once a step."""
        super().__init__(arena, reduction, 1, itemsize)
        self._once = [bucket for bucket in self.buckets if bucket.group not in _OF_A_STAGE]
        #: Gradients in a backward pass, and the layers and the tensors that are there.
        self._partial: dict[Bucket, tuple[Array, set[int], set[str]]] = {}
        self._summed: set[Bucket] = set()
        self._in_flight = SumsInFlight(self.buckets)

    def accumulate(self, layer: int, gradients: Gradients) -> None:
        for bucket in self.buckets:
            if layer in bucket.layers:
                if bucket not in self._partial:
                    self._partial[bucket] = self._fresh(bucket)
                flat, seen, known = self._partial[bucket]
                self.add(layer, gradients, self.arena.within(layer, bucket, flat), known)
                self.used |= known
                seen.add(layer)
                if seen == bucket.layers and bucket not in self._once:
                    self._begin(bucket)

    def progress(self) -> None:
        self._in_flight.progress()

    def wait(self) -> float:
        for bucket in [b for b in self.buckets if b in self._partial or b in self._once]:
            self._begin(bucket)
        self._summed.clear()
        return self._in_flight.wait()

    def _fresh(self, bucket: Bucket) -> tuple[Array, set[int], set[str]]:
        like = self.pieces[0].parameters
        return array_namespace(like).empty(bucket.stop - bucket.start, like.dtype), set(), set()

    def _begin(self, bucket: Bucket) -> None:
        with self._in_flight.timed():
            begun = self._partial.pop(bucket, None)
            whole, _, known = begun or self._fresh(bucket)
            zero_others(self.arena.inside(bucket, whole), known)
            gradients = self.pieces[self.buckets.index(bucket)].gradients
            shard = gradients
            if bucket in self._summed:
                shard = array_namespace(whole).empty(gradients.size, whole.dtype)
            self._summed.add(bucket)
            its_sum = self.bind(bucket, whole, shard)
        self._in_flight.start(bucket, its_sum, partial(_add, gradients, shard, its_sum))


class ShardedGradients(ScatteredGradients):
    """ZeRO-2: a layer's gradients are summed into the shards in each backward pass."""

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as for ``Replicated``."""
        super().__init__(arena, reduction, initial.itemsize)
        _hold_whole(self, _copy(initial, allocate))
        self._describe_sums(initial)

    def _describe_sums(self, like: Array) -> None:
        """Say how the largest bucket is summed; ``like`` has the gradients' type; collective."""
        xp = array_namespace(like)
        largest = max(self.buckets, key=lambda bucket: bucket.stop - bucket.start, default=None)
        # Ranks of other stages share some buckets, and may have another largest: bind every one.
        for bucket, piece in zip(self.buckets, self.pieces, strict=True):
            whole = xp.empty(bucket.stop - bucket.start, like.dtype)
            its_sum = self.bind(bucket, whole, xp.empty(piece.gradients.size, like.dtype))
            if bucket is largest:
                self.describe({bucket: its_sum})
            its_sum.Free()


class ShardedParameters(ScatteredGradients):
    """ZeRO-3: a layer's parameters are gathered for a pass through it, and freed after it.

    The gather of the next layer is started before that pass, so that two layers are whole at most.
    Tensors of several pipeline stages stay whole: the stages do not pass through them together.
    """

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the collectives; collective.  Arguments as for ``Replicated``."""
        super().__init__(arena, reduction, initial.itemsize)
        self.algorithm = "reduce_scatter and allgather"
        self.reason = "of a layer at a time"
        self._whole: dict[Bucket, tuple[Array, int]] = {}
        #: Buckets that are on their way.
        self._coming: dict[Bucket, tuple[Array, Any]] = {}
        for bucket in self.buckets:
            values = array_namespace(initial).array(initial[bucket.start : bucket.stop])
            own = self.own(bucket)
            shard = values[own.start - bucket.start : own.stop - bucket.start]
            if bucket.group in _OF_A_STAGE:
                shard = shard.copy()
            else:
                self._whole[bucket] = (values, 1)
                self.gather_at_publish(bucket, values)
            gradients = array_namespace(initial).zeros_like(shard)
            self.pieces.append(Piece(own.start, shard, gradients, bucket.group))
        #: Buckets of each layer, with the numbers of their pieces.
        self._by_layer: dict[int, list[tuple[Bucket, int]]] = {}
        for number, own_bucket in enumerate(self.buckets):
            for layer in own_bucket.layers:
                self._by_layer.setdefault(layer, []).append((own_bucket, number))

    def offload(self, allocate: Allocate) -> None:
        for number, piece in enumerate(self.pieces):
            if piece.group in _OF_A_STAGE:
                arrays = piece.parameters, piece.gradients
                parameters, gradients = (_copy(array, allocate) for array in arrays)
                self.pieces[number] = replace(piece, parameters=parameters, gradients=gradients)

    def take(self, layer: int, following: Sequence[int] = ()) -> Parameters:
        parameters: dict[str, Array] = {}
        for bucket, number in self._by_layer.get(layer, ()):
            flat, users = self._whole.get(bucket) or (self._arrived(bucket, number), 0)
            self._whole[bucket] = (flat, users + 1)
            parameters |= self.arena.within(layer, bucket, flat)
        if self.reduction.prefetch:
            coming = next((self._by_layer[one] for one in following if one in self._by_layer), [])
            for bucket, number in coming:
                if bucket not in self._whole and bucket not in self._coming:
                    with self._in_flight.timed():
                        self._coming[bucket] = self._gather(bucket, number, is_ahead=True)
        return parameters

    def release(self, layer: int) -> None:
        for bucket, _ in self._by_layer.get(layer, ()):
            flat, users = self._whole.pop(bucket)
            if users > 1:
                self._whole[bucket] = (flat, users - 1)

    def _arrived(self, bucket: Bucket, number: int) -> Array:
        with self._in_flight.timed():
            if bucket not in self._coming:
                return self._gather(bucket, number)[0]
            flat, plan = self._coming.pop(bucket)
            plan.Wait()
        return flat

    def _gather(self, bucket: Bucket, number: int, *, is_ahead: bool = False) -> tuple[Array, Any]:
        """A bucket's parameters, and the plan that completes them, if they are gathered ahead."""
        shard = self.pieces[number].parameters
        comm, counts = self.comm(bucket), self.counts(bucket)
        flat = array_namespace(shard).empty(bucket.stop - bucket.start, shard.dtype)
        if len(set(counts)) == 1:  # a call of equal blocks is parsed once
            return flat, (comm.Iallgather if is_ahead else comm.Allgather)(shard, flat)
        return flat, (comm.Iallgatherv if is_ahead else comm.Allgatherv)(shard, [flat, counts])


def _add(total: Array, shard: Array, its_sum: Sum) -> None:
    its_sum.Free()
    if shard is not total:
        total += shard


def _hold_whole(store: Store, parameters: Array) -> None:
    """Give a store all parameters, of which it updates its shards and gathers the others."""
    xp = array_namespace(parameters)
    store.views = store.arena.views(parameters)
    for bucket in store.buckets:
        own = store.own(bucket)
        gradients = xp.zeros(own.stop - own.start, parameters.dtype)
        store.pieces.append(Piece(own.start, parameters[own], gradients, bucket.group))
        store.gather_at_publish(bucket, parameters[bucket.start : bucket.stop])


def _copy(initial: Array, allocate: Allocate) -> Array:
    copy = allocate(initial.size, initial.dtype)
    copy[...] = initial
    return copy
