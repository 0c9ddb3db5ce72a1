"""The positions of a sample, where the ranks of a group share them (context parallelism)."""

from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from mpitrain.arrays import Array, array_namespace
from mpitrain.group import TensorGroup, share

#: Ways in which context ranks attend to all positions.
Way = Literal["zigzag", "ring", "ulysses"]
#: Most positions of a tile: scores are held for one tile of queries and one of keys at a time.
TILE = 512


class Tile(NamedTuple):
    """Consecutive positions, and where a rank has them.

    Attributes:
        start, stop: positions in the sample.
        here: their places in the rank's arrays.
    """

    start: int
    stop: int
    here: slice


class Positions:
    """The cut of the positions of a sample among the ranks of a group.

    ``zigzag`` makes 2c pieces for c ranks and gives rank r the pieces r and 2c - 1 - r, so that
    causal attention is equal work for all; ``ring`` and ``ulysses`` give each rank one piece.  The
    lengths of pieces differ by one position at most.  A tile has ``tile`` positions at most.
    """

    def __init__(
        self, group: TensorGroup, length: int, way: Way = "zigzag", tile: int = TILE
    ) -> None:
        """``ValueError``: there are fewer positions than pieces."""
        self.group, self.length, self.way, self.tile = group, length, way, tile
        if group.size > 1 and length < self._parts:
            raise ValueError(
                f"parallel.context: {group.size} ranks cut positions into {self._parts} pieces, "
                f"and a sample has {length}; take fewer ranks or longer samples"
            )

    @property
    def whole(self) -> "Positions":
        """All of them on one rank."""
        return Positions(TensorGroup(), self.length, self.way, self.tile)

    @property
    def are_split(self) -> bool:
        return self.group.size > 1

    @property
    def _parts(self) -> int:
        return self.group.size * (2 if self.way == "zigzag" else 1)

    def pieces(self, rank: int) -> list[slice]:
        """The pieces of a rank of the group, in order."""
        own = [rank, self._parts - 1 - rank] if self.way == "zigzag" else [rank]
        return [share(self.length, piece, self._parts) for piece in own]

    def count(self, rank: int) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces(rank))

    @cached_property
    def own(self) -> Array:
        """This rank's positions in the sample, ascending."""
        pieces = self.pieces(self.group.rank)
        return np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])

    def gather(self, x: Array) -> Array:
        """The x_NT... of all ranks, in the order of the sample; collective."""
        whole = array_namespace(x).zeros((len(x), self.length, *x.shape[2:]), x.dtype)
        whole[:, self.own] = x
        return self.group.sum(whole)

    def tiles(self, rank: int) -> list[Tile]:
        """A rank's positions in tiles, which its arrays hold one behind the other."""
        found, here = [], 0
        for piece in self.pieces(rank):
            for start in range(piece.start, piece.stop, self.tile):
                stop = min(start + self.tile, piece.stop)
                found.append(Tile(start, stop, slice(here, here + stop - start)))
                here += stop - start
        return found
