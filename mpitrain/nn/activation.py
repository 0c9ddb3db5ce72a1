"""Layers without parameters that work on each number or move axes."""

from math import prod

from mpitrain.arrays import Array, Pair, Parameters, Shape, array_namespace
from mpitrain.kernels import kernels_of
from mpitrain.nn.layer import Elementwise, Layer


class ReLU(Elementwise):
    """``max(x, 0)``; the gradient at 0 is 0."""

    by_point = True

    def forward(self, parameters: Parameters, x: Array) -> Pair:
        return array_namespace(x).maximum(x, 0), x > 0

    def backward(self, parameters: Parameters, saved: Array, dy: Array) -> tuple[Array, None]:
        return dy * saved, None


class GELU(Elementwise):
    """``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (Hendrycks & Gimpel 2016)."""

    by_point = True

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Pair]:
        y, tanh = kernels_of(x).gelu(x)
        return y, (x, tanh)

    def backward(self, parameters: Parameters, saved: Pair, dy: Array) -> tuple[Array, None]:
        x, tanh = saved
        return kernels_of(x).gelu_gradient(x, tanh, dy), None


class Flatten(Layer):
    """All axes but the batch's made one: x_N... to y_NI."""

    def output_shape(self, shape: Shape) -> Shape:
        return (prod(shape),)

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Shape]:
        # Not reshape(n, -1): for a batch without samples -1 could be any length.
        return x.reshape(len(x), prod(x.shape[1:])), x.shape

    def backward(self, parameters: Parameters, saved: Shape, dy: Array) -> tuple[Array, None]:
        return dy.reshape(saved), None
