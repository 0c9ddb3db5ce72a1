"""Rotations: the energy of a vector spread evenly over its elements.

A rotation has orthonormal rows, so that lengths stay and sums of rotated vectors are the rotated
sum: it may be undone after the sum.  No element of the rotated vector is much larger than the
others, whatever the vector was, so that a quantiser with one scale loses the least
(Konecny et al. 2016; Suresh et al. 2017).
"""

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress.seeds import generator

#: Bound of the numbers, so that no sum overflows.
_MOST = 1e290


def padded(n: int) -> int:
    """Elements of a rotated vector of ``n``: the next power of two."""
    return 1 << (n - 1).bit_length() if n else 0


def random_signs(n: int, *words: int | str) -> Array:
    """n of -1 and 1, drawn by these words; float64."""
    bits = np.frombuffer(generator(*words, "signs").bytes(-(-n // 8)), np.uint8)
    return 1.0 - 2.0 * np.unpackbits(bits, count=n)


def rotate(x: Array, signs: Array) -> Array:
    """H D x: signs, then the orthonormal Walsh-Hadamard transform.

    Linear: vectors rotated by the same signs may be summed, and the sum be rotated back.
    Cost: n log2(n) additions.

    Args:
        x: shape (n,).
        signs: D, -1 or 1, shape (padded(n),), as is the result; float64.
    """
    z = np.zeros(len(signs))
    z[: len(x)] = x
    np.clip(z, -_MOST, _MOST, out=z)
    z *= signs
    return _hadamard(z)


def unrotate(z: Array, n: int, signs: Array) -> Array:
    """The vector of shape (n,) that :func:`rotate` made ``z`` of; float64, ``z`` is not changed.

    It is also the transpose: for any ``z``, the vector whose rotation is nearest to it.
    """
    x = _hadamard(np.clip(np.array(z, np.float64), -_MOST, _MOST))
    x *= signs
    return x[:n]


def _hadamard(x: Array) -> Array:
    """The transform of ``x``, which is overwritten.

    It is that of the rows and then of the columns of a matrix, so that all loops are long.  Sums
    are of two, in a fixed order: the same bits on all processors.
    """
    if not len(x):
        return x
    x /= np.sqrt(len(x))
    matrix = _butterflies(x.reshape(-1, 1 << (len(x).bit_length() - 1) // 2))
    matrix[...] = _butterflies(np.ascontiguousarray(matrix.T)).T
    return x


def _butterflies(x: Array) -> Array:
    """The transform of axis 0 of two, in place."""
    rows, columns = x.shape
    half = 1
    while half < rows:
        pairs = x.reshape(rows // (2 * half), 2, half * columns)
        first, second = pairs[:, 0], pairs[:, 1]
        difference = first - second
        first += second
        second[...] = difference
        half *= 2
    return x
