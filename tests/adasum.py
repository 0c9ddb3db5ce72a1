"""Adasum of vectors in one process, for comparison."""

import numpy as np

from mpitrain.parallel.adasum_sum import levels


def adasum(vectors):
    """The Adasum of the vectors of p ranks, any p, for one tensor; shape and type of the first.

    Args:
        vectors: changes of weights, or gradients, in the order of ranks.
    """
    parts = [np.asarray(vector, np.float64) for vector in vectors]
    for level in levels(len(parts)):
        for keeps, gives in level:
            parts[keeps] = pair(parts[keeps], parts[gives])
    return parts[0].astype(vectors[0].dtype)


def pair(a, b):
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
