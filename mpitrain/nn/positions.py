"""The positions of a sample, where the ranks of a group share them (context parallelism)."""

from collections.abc import Callable
from functools import cache, cached_property
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from mpitrain.arrays import Array, array_namespace
from mpitrain.group import TensorGroup, share

#: Ways in which context ranks attend to all positions.
Way = Literal["zigzag", "ring", "ulysses"]
#: Most positions of a tile: scores are held for one tile of queries and one of keys at a time.
TILE = 512


class Tile(NamedTuple):
    """Queries of a rank and keys of an owner, at most so many that their scores are held at a time.

    Attributes:
        rows, columns: places of the queries and of the keys in the arrays of their ranks.
        queries, keys: their positions in the sample.
        later: diagonal of the scores from which on keys are later than queries; None: no key is.
    """

    rows: slice
    columns: slice
    queries: Array
    keys: Array
    later: int | None = None


class Positions:
    """The cut of the positions of a sample among the ranks of a group.

    ``zigzag`` makes 2c pieces for c ranks and gives rank r the pieces r and 2c - 1 - r, so that
    causal attention is equal work for all; ``ring`` and ``ulysses`` give each rank one piece.  The
    lengths of pieces differ by one position at most.  A tile has ``tile`` queries and keys at most.
    """

    #: Whether the labels of a sample are cut, too.
    cuts_labels = True

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

    def of(self, rank: int) -> Array:
        """A rank's positions in the sample, ascending."""
        return np.concatenate([np.arange(one.start, one.stop) for one in self.pieces(rank)])

    @cached_property
    def own(self) -> Array:
        """This rank's positions in the sample, ascending."""
        return self.of(self.group.rank)

    def gather(self, x: Array) -> Array:
        """The x_NT... of all ranks, in the order of the sample; collective."""
        whole = array_namespace(x).zeros((len(x), self.length, *x.shape[2:]), x.dtype)
        whole[:, self.own] = x
        return self.group.sum(whole)

    @cached_property
    def tiles(self) -> Callable[[int, bool], list[Tile]]:
        """Gives the tiles of this rank's queries with an owner's keys, ``tiles(owner, causal)``.

        If attention is causal, keys must not be later.  Where both cut positions in zigzag, all
        queries see the first piece of an earlier rank, and the second half of the queries sees
        both pieces of a later one: half of the scores, each in one rectangle.
        """
        return cache(self._tiles)

    def _tiles(self, owner: int, causal: bool) -> list[Tile]:
        queries, keys = self.own, self.of(owner)
        first, stop = 0, len(keys)
        if causal:
            first = int(np.searchsorted(queries, keys[0]))
            stop = int(np.searchsorted(keys, queries[-1], side="right"))
        found = []
        for rows, columns in product(self._cut(first, len(queries)), self._cut(0, stop)):
            tile = Tile(rows, columns, queries[rows], keys[columns])
            if causal and tile.keys[-1] > tile.queries[0]:
                if tile.keys[0] > tile.queries[-1]:
                    continue
                tile = tile._replace(later=rows.start - columns.start + 1)
            found.append(tile)
        return found

    def _cut(self, first: int, stop: int) -> list[slice]:
        """These places in as few equal parts as tiles may have."""
        parts = -(-(stop - first) // self.tile)
        own = [share(stop - first, part, parts) for part in range(parts)]
        return [slice(first + one.start, first + one.stop) for one in own]
