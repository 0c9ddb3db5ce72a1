"""Data parallelism: everything on every replica, and the sum of gradients over all of them."""

from typing import Any

from mpi4py import MPI

from mpitrain.arena import Arena, Bucket
from mpitrain.arrays import Array, Parameters
from mpitrain.group import share
from mpitrain.parallel.store import Allocate, Piece, Reduction, Store


class Replicated(Store):
    """Parameters and gradients whole; one all-reduce a bucket, in place, bound once.

    Cost a step: an all-reduce of the gradients.  Bitwise the same result on every replica.

    Attributes:
        parameters, gradients: flat arrays in the arena's layout.
    """

    is_replicated = True

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Bind the all-reduces; collective.

        Args:
            arena: the layout.
            initial: flat parameters, which become the store's.
            reduction: how gradients are summed.
            allocate: ``allocate(size, dtype)`` makes the gradients' array;
                ``Communicator.empty`` puts it where a node's ranks reduce it without messages.
        """
        super().__init__(arena, reduction, reduction.bucket_bytes, initial.itemsize)
        self.parameters = initial
        self.gradients = allocate(arena.size, initial.dtype)
        self.gradients[...] = 0
        self._views = arena.views(self.parameters)
        self._sums = arena.views(self.gradients)
        self.pieces = [
            Piece(
                b.start,
                self.parameters[b.start : b.stop],
                self.gradients[b.start : b.stop],
                b.group,
            )
            for b in self.buckets
        ]
        self._plans = {
            bucket: self.comm(bucket).Allreduce_init(
                MPI.IN_PLACE,
                self.gradients[bucket.start : bucket.stop],
                algorithm=reduction.algorithm,
            )
            for bucket in self.buckets
            if self.comm(bucket).size > 1
        }
        self.describe(self._plans)

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def accumulate(self, layer: int, gradients: Parameters) -> None:
        for name, total in self._sums[layer].items():
            total += gradients[name]

    def counted(self, piece: Piece) -> slice:
        # The replicas hold the same: each takes its share of the work.
        comm = self.reduction.groups[piece.group]
        return share(piece.parameters.size, comm.rank, comm.size)

    def close(self) -> None:
        while self._plans:
            self._plans.popitem()[1].Free()

    def _start(self, bucket: Bucket) -> Any:
        plan = self._plans.get(bucket)
        if plan is not None:
            plan.Start()
        return plan
