"""Adasum: the mean of parallel vectors and the sum of orthogonal ones."""

import numpy as np

from mpitrain.arrays import Array


def pair(a: Array, b: Array) -> Array:
    """a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2): the mean of equal vectors, the sum of
    orthogonal ones (Maleki et al. 2021).

    Products are of float64, in one fixed order; a vector of 0 adds nothing.
    """
    most = max(float(np.abs(a).max(initial=0)), float(np.abs(b).max(initial=0)))
    if not most:
        return a + b
    x, y = a.astype(np.float64) / most, b.astype(np.float64) / most  # no square overflows
    dot, x_square, y_square = float(x @ y), float(x @ x), float(y @ y)
    first = 1 - dot / (2 * x_square) if x_square else 1.0
    second = 1 - dot / (2 * y_square) if y_square else 1.0
    return (first * x + second * y) * most


def levels(size: int) -> list[list[tuple[int, int]]]:
    """Pairs of ranks that combine their vectors, level by level; the first of a pair keeps both.

    Ranks from the largest power of two on first combine with the ranks as far below; then
    neighbours do, neighbours of neighbours and so on.  The rule is not associative, so that the
    tree is part of the result.
    """
    power = 1 << size.bit_length() - 1
    found = [[(rank - power, rank) for rank in range(power, size)]] if size > power else []
    reach = 1
    while reach < power:
        found.append([(rank, rank + reach) for rank in range(0, power, 2 * reach)])
        reach *= 2
    return found
