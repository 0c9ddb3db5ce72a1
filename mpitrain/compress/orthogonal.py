"""Orthonormal columns, the same bits on all ranks of one kind of processor."""

import numpy as np

from mpitrain.arrays import Array


def orthonormal(matrix: Array) -> Array:
    """An orthonormal basis of the columns of ``matrix``, by Gram and Schmidt, each twice.

    A column that depends linearly on those before it, up to rounding, becomes 0.

    Returns:
        A new array, float64, of the same shape.
    """
    columns = np.array(matrix.T, np.float64)
    least = 8 * np.sqrt(max(matrix.shape, default=0)) * np.finfo(matrix.dtype).eps
    for number, column in enumerate(columns):
        column /= np.abs(column).max(initial=0) or 1  # no square under- or overflows
        before, length = columns[:number], np.sqrt(column @ column)
        for _ in range(2):  # twice is enough (Giraud et al. 2005)
            column -= (before @ column) @ before
        left = np.sqrt(column @ column)
        column *= 1 / left if left > least * length else 0
    return np.ascontiguousarray(columns.T)


def renewed(basis: Array, random: np.random.Generator) -> Array:
    """Basis with random directions in place of zeros, which no power iteration would leave."""
    missing = ~basis.any(0)
    if not missing.any():
        return basis
    found = np.concatenate([basis[:, ~missing], random.normal(size=(len(basis), missing.sum()))], 1)
    return orthonormal(found)
