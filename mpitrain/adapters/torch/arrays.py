"""The same memory for torch and for NumPy."""

import numpy as np
import torch

from mpitrain.arrays import Array


def as_array(tensor: torch.Tensor) -> Array:
    """A tensor on the CPU as an array of the same shape.

    Raises:
        ImportError: bfloat16 without ml_dtypes.
        TypeError: a type that NumPy does not have.
    """
    values = tensor.detach()
    if values.dtype != torch.bfloat16:
        found: Array = values.numpy()
        return found
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("bfloat16 parameters need ml_dtypes; pip install ml_dtypes") from error
    return np.asarray(values.view(torch.int16).numpy().view(ml_dtypes.bfloat16))


def as_tensor(array: Array) -> torch.Tensor:
    """An array as a tensor of the same shape."""
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def as_bytes(tensor: torch.Tensor) -> Array:
    """The values of a tensor of any type and layout, of shape (bytes,); a copy if need be."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    found: Array = values.view(torch.uint8).numpy()
    return found
