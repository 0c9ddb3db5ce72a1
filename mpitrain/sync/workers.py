"""A strategy's view of a rank: its worker's weights, and its peers in the other workers."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.parallel.arena import Arena
from mpitrain.parallel.store import Piece
from mpitrain.parallel.summation import Dense, Summation


@dataclass(frozen=True)
class Workers:
    """A rank's part of its worker, and its peers: the ranks with the same part of other workers.

    Attributes:
        comm: peers, one rank of each worker, in the order of workers.
        arena: layout of the flat arrays.
        parameters, gradients: flat arrays of this worker, shape (arena.size,).
        pieces: pieces of these arrays that are updated; they share the memory.
        state: optimiser state of each piece, by slot.
        owned: elements of the arena that this rank counts in sums over its worker.
        summation: makes the summation for exchanges, dense or with a codec.
        dense: summation without a codec.
        never_used: gives the names of the tensors that this worker has never used.
    """

    comm: Communicator
    arena: Arena
    parameters: Array
    gradients: Array
    pieces: Sequence[Piece]
    state: Sequence[Mapping[str, Array]]
    owned: Sequence[slice]
    summation: Callable[[], Summation]
    dense: Dense
    never_used: Callable[[], Set[str]] = frozenset

    def squares(self, flat: Array) -> float:
        """Sum of the squares of the elements that this rank counts."""
        return float(sum(np.square(flat[part], dtype=float).sum() for part in self.owned))
