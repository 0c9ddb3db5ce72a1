"""What arrays are here, and the namespace that they come from."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A NumPy array, or a CuPy array: it has the same methods.
Array = NDArray[Any]
#: A number, or one that lies on a device, where :meth:`mpitrain.device.Device.read` waits for it.
Scalar = Any
#: A layer's arrays by name: parameters, or the gradients of the loss by them.
Parameters = Mapping[str, Array]
#: The gradients of the loss by a layer's parameters; None of one that had no part in it.
Gradients = Mapping[str, Array | None]
#: Shape of one sample: there is no batch axis.
Shape = tuple[int, ...]


def is_floating(kind: Any) -> bool:
    """Whether a ``dtype`` is of floating point; to NumPy, bfloat16 is a type of another kind."""
    return kind.kind == "f" or kind.name == "bfloat16"


def array_namespace(x: Array) -> ModuleType:
    """The module, ``numpy`` or ``cupy``, whose functions work on ``x``."""
    kind = type(x)
    if kind is np.ndarray or issubclass(kind, np.ndarray):
        return np
    return sys.modules[kind.__module__.partition(".")[0]]
