"""Element-wise non-linear functions."""

import math

from mpitrain.nn.layer import Array, Layer, Parameters, Shape, array_namespace


class _Elementwise(Layer):
    def output_shape(self, shape: Shape) -> Shape:
        return shape


class ReLU(_Elementwise):
    """``max(x, 0)``; the gradient at 0 is 0."""

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Array]:
        return array_namespace(x).maximum(x, 0), x > 0

    def backward(
        self, parameters: Parameters, saved: Array, dy: Array
    ) -> tuple[Array, dict[str, Array]]:
        return dy * saved, {}


class GELU(_Elementwise):
    """``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (Hendrycks & Gimpel 2016)."""

    _SCALE = math.sqrt(2.0 / math.pi)
    _CUBIC = 0.044715

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, tuple[Array, Array]]:
        tanh = array_namespace(x).tanh(self._SCALE * (x + self._CUBIC * x * x * x))
        return 0.5 * x * (1.0 + tanh), (x, tanh)

    def backward(
        self, parameters: Parameters, saved: tuple[Array, Array], dy: Array
    ) -> tuple[Array, dict[str, Array]]:
        x, tanh = saved
        slope = self._SCALE * (1.0 + 3.0 * self._CUBIC * x * x)
        return dy * 0.5 * (1.0 + tanh + x * (1.0 - tanh * tanh) * slope), {}
