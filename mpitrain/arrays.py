"""Types of arrays, and the namespace of an array's functions."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

#: A NumPy array, or a CuPy array, which has the same methods.
Array = NDArray[Any]
#: Two arrays that a layer keeps.
Pair = tuple[Array, Array]
#: A number in memory or on a device; :meth:`mpitrain.device.Device.read` copies it to memory.
Scalar = Any
#: Result of a loss: its value, its gradient by the outputs, and perhaps what counts in its labels.
Judged = tuple[Scalar, Array] | tuple[Scalar, Array, Scalar]
#: A layer's arrays by name: its parameters, or the loss's gradients with respect to them.
Parameters = Mapping[str, Array]
#: The loss's gradients with respect to a layer's parameters; None: no influence on the loss.
Gradients = Mapping[str, Array | None]
#: Shape of one sample: there is no batch axis.
Shape = tuple[int, ...]


def is_floating(kind: Any) -> bool:
    """Whether a ``dtype`` is a floating-point type, including bfloat16 (NumPy kind "V")."""
    return kind.kind == "f" or kind.name == "bfloat16"


def is_narrow(kind: Any) -> bool:
    """Whether a ``dtype`` is a floating-point type of 16 bits or fewer, whose sums need more."""
    return kind.itemsize <= 2 and is_floating(kind)


def as_inputs(x: Array, dtype: Any, choices: int) -> Array:
    """A model's inputs as numbers of ``dtype``; integers stay where a table takes them.

    ``choices``: those of the model, see :class:`mpitrain.nn.Layer`.  Records stay as they are.
    """
    kinds = "f" if choices else "fiub"
    return x.astype(dtype, copy=False) if x.dtype.kind in kinds else x


def array_namespace(x: Array) -> ModuleType:
    """The module, ``numpy`` or ``cupy``, whose functions work on ``x``."""
    kind = type(x)
    if kind is np.ndarray or issubclass(kind, np.ndarray):
        return np
    if own := getattr(x, "xp", None):  # records on a device
        return cast("ModuleType", own)
    return sys.modules[kind.__module__.partition(".")[0]]
