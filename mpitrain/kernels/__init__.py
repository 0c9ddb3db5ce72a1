"""Operations that a GPU does in one kernel; NumPy's lines define them."""

import numpy as np

from mpitrain import extras
from mpitrain.arrays import Array, Scalar, array_namespace
from mpitrain.kernels.host import HOST, Kernels

__all__ = ["HOST", "Kernels", "kernels_of", "square_sum"]


def kernels_of(x: Array) -> Kernels:
    """The operations for arrays of ``x``'s namespace."""
    xp = array_namespace(x)
    return HOST if xp is np else extras.CudaKernels(xp)


def square_sum(x: Array) -> Scalar:
    """Sum of squares, in float64."""
    return kernels_of(x).square_sum([x])
