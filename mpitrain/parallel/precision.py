"""Mixed precision: 16-bit copies of the parameters for layers, and the loss scale."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.errors import needed
from mpitrain.arrays import Parameters
from mpitrain.parallel.store import Weights

#: Limit of the scale, far above any useful one; gradients of 0 would double it without end.
_LARGEST_SCALE = 2.0**64


class CastWeights:
    """A store's parameters as layers see them, rounded to another type (Micikevicius et al. 2018).

    Each layer's parameters are rounded once, or where ranks have shards of them, for each pass:
    call :meth:`forget` when they have changed.
    """

    def __init__(self, weights: Weights, dtype: Any, *, keeps: bool = True) -> None:
        """``keeps``: whether rounded parameters stay between passes."""
        self._weights, self._keeps = weights, keeps
        self._dtype = dtype
        self._cast: dict[int, Parameters] = {}

    def take(self, layer: int, following: Sequence[int] = ()) -> Parameters:
        if layer not in self._cast:
            wide = self._weights.take(layer, following)
            self._cast[layer] = {name: value.astype(self._dtype) for name, value in wide.items()}
            self._weights.release(layer)
        return self._cast[layer]

    def release(self, layer: int) -> None:
        if not self._keeps:
            del self._cast[layer]

    def forget(self) -> None:
        """Drop the rounded parameters, as the parameters have changed."""
        self._cast.clear()


class LossScale:
    """Factor on the loss: halved when a gradient overflows, doubled after a while without.

    The ranks agree on each overflow, so that the scale is the same on all of them.

    Attributes:
        value: current factor; 1 means that nothing is scaled.
    """

    def __init__(self, value: float, window: int, *, enabled: bool) -> None:
        self.value = value if enabled else 1.0
        self.good_steps = 0
        self.enabled = enabled
        self._window = window

    def overflowed(self) -> None:
        """Halve the scale after a step that was skipped."""
        self.value = max(1.0, self.value / 2)
        self.good_steps = 0

    def went_well(self) -> None:
        """Count a step that was taken; after enough of them, double the scale."""
        self.good_steps += 1
        if self.enabled and self.good_steps % self._window == 0 and self.value < _LARGEST_SCALE:
            self.value *= 2


def compute_type(name: str, dtype: Any) -> Any:
    """Activations' type: ``same`` as ``dtype``, or of 16 bits; ImportError: no ml_dtypes for it."""
    if name == "same":
        return np.dtype(dtype)
    if name == "float16":
        return np.dtype(np.float16)
    return np.dtype(needed("ml_dtypes", "bfloat16", "run.compute = 'bfloat16'").bfloat16)
