"""Affine maps of the last axis."""

from collections.abc import Mapping
from math import prod
from typing import Literal

from mpitrain.arrays import Array, Pair, Parameters, Shape
from mpitrain.kernels.host import total
from mpitrain.nn.layer import Elementwise, Initial, Layer, he_deviation, matmul
from mpitrain.nn.sizes import expect_features, expect_sizes


class Linear(Layer):
    """``y_..O = x_..I @ weight_IO + bias_O``; 2 I O operations a sample."""

    by_point = True

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = True, deviation: float | None = None,
        split: Literal["inputs", "outputs"] | None = None,
    ) -> None:  # fmt: skip
        """Describe the layer.

        Args:
            inputs, outputs: sizes of the last axes of x and y, over all tensor ranks.
            bias: whether a bias is added.
            deviation: standard deviation of the initial weights; He's by default.
            split: axis that the ranks of a tensor group share (Shoeybi et al. 2019): ``outputs``
                gives each rank columns of y, ``inputs`` one term of a sum.

        Raises:
            ValueError: a size is below 1, or a bias with split inputs would be added once a rank;
                use :class:`Bias`.
        """
        expect_sizes("Linear", inputs=inputs, outputs=outputs)
        if bias and split == "inputs":
            raise ValueError("with split inputs the bias comes after the sum over ranks: nn.Bias")
        self.inputs = inputs
        self.outputs = outputs
        self.bias = bias
        self.deviation = he_deviation(inputs) if deviation is None else deviation
        if split == "outputs":
            self.split = {"weight": 1} | ({"bias": 0} if bias else {})
        elif split == "inputs":
            self.split = {"weight": 0}

    def initial(self) -> Mapping[str, Initial]:
        weight = Initial((self.inputs, self.outputs), self.deviation)
        return {"weight": weight} | ({"bias": Initial((self.outputs,))} if self.bias else {})

    def output_shape(self, shape: Shape) -> Shape:
        expect_features("linear layer", self.inputs, shape)
        return *shape[:-1], self.outputs

    def forward(self, parameters: Parameters, x: Array) -> Pair:
        y = matmul(x, parameters["weight"])
        if self.bias:
            y += parameters["bias"]
        return y, x

    def backward(self, parameters: Parameters, saved: Array, dy: Array) -> tuple[Array, Pair]:
        return matmul(dy, parameters["weight"].T), (saved, dy)

    def kept(self, parameters: Parameters, saved: Array, dy: Array) -> Pair:
        return saved, dy

    def gradients(self, parameters: Parameters, kept: Pair) -> dict[str, Array]:
        x, dy = kept
        inputs, outputs = parameters["weight"].shape
        rows = prod(x.shape[:-1])
        x_NI, dy_NO = x.reshape(rows, inputs), dy.reshape(rows, outputs)
        weight = {"weight": matmul(x_NI.T, dy_NO)}
        return weight | ({"bias": total(dy_NO, axis=0)} if self.bias else {})


class Bias(Elementwise):
    """``y_..I = x_..I + bias_I``, for a bias that is added after a sum over ranks."""

    by_point = True

    def __init__(self, features: int) -> None:
        """``features``: size of the last axis; ``ValueError`` below 1."""
        expect_sizes("Bias", features=features)
        self.features = features

    def initial(self) -> Mapping[str, Initial]:
        return {"bias": Initial((self.features,))}

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, None]:
        return x + parameters["bias"], None

    def backward(self, parameters: Parameters, saved: None, dy: Array) -> Pair:
        return dy, dy

    def gradients(self, parameters: Parameters, kept: Array) -> dict[str, Array]:
        return {"bias": total(kept, axis=tuple(range(kept.ndim - 1)))}
