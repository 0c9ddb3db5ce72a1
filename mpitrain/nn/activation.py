"""Element-wise non-linear functions."""

from mpitrain.arrays import Array, Parameters, array_namespace
from mpitrain.kernels import kernels_of
from mpitrain.nn.layer import Elementwise


class ReLU(Elementwise):
    """``max(x, 0)``; the gradient at 0 is 0."""

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Array]:
        return array_namespace(x).maximum(x, 0), x > 0

    def backward(self, parameters: Parameters, saved: Array, dy: Array) -> tuple[Array, None]:
        return dy * saved, None


class GELU(Elementwise):
    """``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (Hendrycks & Gimpel 2016)."""

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, tuple[Array, Array]]:
        y, tanh = kernels_of(x).gelu(x)
        return y, (x, tanh)

    def backward(
        self, parameters: Parameters, saved: tuple[Array, Array], dy: Array
    ) -> tuple[Array, None]:
        x, tanh = saved
        return kernels_of(x).gelu_gradient(x, tanh, dy), None
