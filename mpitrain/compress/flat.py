"""Tensors by name as one vector."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpitrain.arrays import Array


def type_of(tensors: Mapping[str, Array]) -> "np.dtype[Any]":
    """Type that holds the numbers of all tensors."""
    return np.result_type(*tensors.values()) if tensors else np.dtype(np.float32)


def gather(tensors: Mapping[str, Array], flat: Array) -> None:
    """Write the tensors into ``flat``, one after the other."""
    at = 0
    for tensor in tensors.values():
        flat[at : at + tensor.size] = tensor.reshape(-1)
        at += tensor.size


def scatter(flat: Array, tensors: Mapping[str, Array]) -> None:
    """Write what :func:`gather` wrote into tensors of the same shapes."""
    at = 0
    for tensor in tensors.values():
        tensor[...] = flat[at : at + tensor.size].reshape(tensor.shape)
        at += tensor.size
