"""Element-wise non-linear functions."""

import math

from mpitrain.arrays import Array, Parameters, array_namespace
from mpitrain.nn.layer import Elementwise


class ReLU(Elementwise):
    """``max(x, 0)``; the gradient at 0 is 0."""

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Array]:
        return array_namespace(x).maximum(x, 0), x > 0

    def backward(self, parameters: Parameters, saved: Array, dy: Array) -> tuple[Array, None]:
        return dy * saved, None


class GELU(Elementwise):
    """``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (Hendrycks & Gimpel 2016)."""

    _SCALE = math.sqrt(2.0 / math.pi)
    _CUBIC = 0.044715

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, tuple[Array, Array]]:
        # In place where it can be: these arrays are the largest of a transformer.
        inner = x * x
        inner *= self._SCALE * self._CUBIC
        inner += self._SCALE
        inner *= x
        tanh = array_namespace(x).tanh(inner, out=inner)
        y = tanh.copy()
        y += 1.0
        y *= x
        y *= 0.5
        return y, (x, tanh)

    def backward(
        self, parameters: Parameters, saved: tuple[Array, Array], dy: Array
    ) -> tuple[Array, None]:
        x, tanh = saved
        slope = x * x
        slope *= 3.0 * self._SCALE * self._CUBIC
        slope += self._SCALE
        slope *= x
        rest = tanh * tanh
        slope -= slope * rest
        slope += tanh
        slope += 1.0
        slope *= dy
        slope *= 0.5
        return slope, None
