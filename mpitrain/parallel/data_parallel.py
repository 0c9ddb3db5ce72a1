"""Data parallelism: everything on every replica, and the sum of gradients over all of them."""

from mpitrain.arrays import Array, Parameters
from mpitrain.group import share
from mpitrain.parallel.arena import Arena
from mpitrain.parallel.store import Allocate, Piece, Reduction
from mpitrain.parallel.whole import WholeGradients


class Replicated(WholeGradients):
    """Parameters and gradients whole; one sum a bucket, in place, bound once.

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
        super().__init__(arena, reduction, allocate(arena.size, initial.dtype))
        self.parameters = initial
        self._views = arena.views(self.parameters)
        self.pieces = [
            Piece(
                b.start,
                self.parameters[b.start : b.stop],
                self.gradients[b.start : b.stop],
                b.group,
            )
            for b in self.buckets
        ]
        self.bind_sums()

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def counted(self, piece: Piece) -> slice:
        # The replicas hold the same: each takes its share of the work.
        comm = self.reduction.groups[piece.group]
        return share(piece.parameters.size, comm.rank, comm.size)
