"""Swing: a butterfly whose partners stay close on a ring or torus.

In step s, rank r exchanges with r + rho(s) if it is even and r - rho(s) if it is odd, where rho is
1, -1, 3, -5, 11, ...: to both sides in turn, so that a message passes fewer links than at distance
2^s.  De Sensi et al.: "Swing: short-cutting rings for higher bandwidth allreduce", NSDI 2024.
"""

from collections.abc import Iterator
from functools import cache

from collectives.algorithms.butterfly import Exchange, Fold, there_and_back
from collectives.schedule import Round


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter in log2 p steps, and all-gather by the same steps backwards.

    The chunks are laid out so that all that a rank passes on in a step is adjacent.  Cost: 2 log2 p
    rounds, 2(p-1)/p of the buffer sent by each rank; for p no power of two, the fold of
    :mod:`collectives.algorithms.butterfly` adds two rounds of the whole buffer.
    """
    yield from there_and_back(rank, size, _exchanges)


def partner(vertex: int, step: int, dimensions: int) -> int:
    """The vertex that ``vertex`` exchanges with.

    >>> [partner(0, step, 4) for step in range(4)]
    [1, 15, 3, 11]
    """
    rho = (1 - (-2) ** (step + 1)) // 3
    return (vertex + (rho if vertex % 2 == 0 else -rho)) % (1 << dimensions)


def _exchanges(fold: Fold, vertex: int) -> Iterator[Exchange]:
    place = _places(fold.dimensions)[vertex]
    for step in range(fold.dimensions):
        length = 1 << (fold.dimensions - 1 - step)
        half = place // length
        given, kept = (slice(h * length, (h + 1) * length) for h in (half ^ 1, half))
        yield fold.rank(partner(vertex, step, fold.dimensions)), given, kept


@cache
def _places(dimensions: int) -> list[int]:
    """The chunk that each vertex ends its reduce-scatter with.

    Whom a vertex reaches from step s on is one half of whom it reaches from step s-1 on, so laying
    the halves side by side makes each of these sets an aligned range of places.
    """
    order = [0]
    for step in range(dimensions):
        order = [v for first in order for v in (first, partner(first, step, dimensions))]
    places = [0] * len(order)
    for place, vertex in enumerate(order):
        places[vertex] = place
    return places
