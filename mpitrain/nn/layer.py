"""What a layer is: three pure functions, and the namespace that its arrays come from."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: A NumPy array, or a CuPy array: it has the same methods.
Array = NDArray[Any]
#: A layer's arrays by name: parameters, or the gradients of the loss by them.
Parameters = Mapping[str, Array]
#: Shape of one sample: there is no batch axis.
Shape = tuple[int, ...]


def array_namespace(x: Array) -> ModuleType:
    """The module, ``numpy`` or ``cupy``, whose functions work on ``x``."""
    return sys.modules[type(x).__module__.partition(".")[0]]


class Layer(ABC):
    """A differentiable function ``y = f(parameters, x)`` of a batch, with no state of its own.

    Whoever calls it owns the parameters and what the forward pass saved.  So training on stashed
    weights, recomputing activations or sharding parameters is calling it with other arguments.
    A batch may hold no sample at all; results then have a batch axis of length 0.
    """

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        """Initial values; the same ``rng`` state gives the same values whatever ``xp`` is."""
        return {}

    @abstractmethod
    def output_shape(self, shape: Shape) -> Shape:
        """Shape of one output for one input of ``shape``; ``ValueError`` if that cannot be one."""

    @abstractmethod
    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Any]:
        """Return ``(y, saved)``; ``saved`` is for :meth:`backward` alone."""

    @abstractmethod
    def backward(
        self, parameters: Parameters, saved: Any, dy: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Gradients of the loss by ``x`` and by each parameter, given ``dy``, the one by ``y``."""


def he_normal(
    rng: np.random.Generator, shape: Shape, fan_in: int, xp: ModuleType, dtype: DTypeLike
) -> Array:
    """Normal values of variance ``2 / fan_in``, which suits ReLU (He et al. 2015)."""
    values: Array = xp.asarray(rng.normal(0.0, math.sqrt(2.0 / fan_in), shape), dtype=dtype)
    return values
