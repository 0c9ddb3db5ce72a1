"""Positions for heads and back, by all-to-alls (Ulysses, Jacobs et al. 2023).

Each rank attends to all positions with some of the heads.  Axes are (k, N, H, T, E): k arrays, N
samples, H heads, T positions, E numbers of a head.
"""

from mpitrain.arrays import Array, array_namespace
from mpitrain.group import share
from mpitrain.nn.positions import Positions


def heads_of(count: int, positions: Positions) -> list[slice]:
    """The heads of each rank while it has all positions."""
    size = positions.group.size
    return [share(count, rank, size) for rank in range(size)]


def _is_even(count: int, positions: Positions) -> bool:
    """Whether all ranks have equally many heads, and equally many positions."""
    size = positions.group.size
    return count % size == 0 and positions.length % size == 0


def to_heads(x: Array, positions: Positions) -> Array:
    """From own positions of all heads to all positions of own heads."""
    heads, xp = heads_of(x.shape[2], positions), array_namespace(x)
    own = heads[positions.group.rank]
    shapes = [
        (*x.shape[:2], own.stop - own.start, positions.count(rank), x.shape[4])
        for rank in range(positions.group.size)
    ]
    is_even = _is_even(x.shape[2], positions)
    found = positions.group.exchange([x[:, :, part] for part in heads], shapes, is_even=is_even)
    return xp.concatenate(found, axis=3)


def to_positions(x: Array, positions: Positions, count: int) -> Array:
    """The way back; ``count``: number of all heads."""
    ranks, xp = range(positions.group.size), array_namespace(x)
    pieces = [positions.pieces(rank)[0] for rank in ranks]
    own = positions.count(positions.group.rank)
    shapes = [
        (*x.shape[:2], part.stop - part.start, own, x.shape[4])
        for part in heads_of(count, positions)
    ]
    parts, is_even = [x[:, :, :, piece] for piece in pieces], _is_even(count, positions)
    found = positions.group.exchange(parts, shapes, is_even=is_even)
    return xp.concatenate(found, axis=2)
