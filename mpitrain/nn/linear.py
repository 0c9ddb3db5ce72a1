"""Affine maps of the last axis."""

from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Parameters, Shape
from mpitrain.nn.layer import Elementwise, Layer, he_normal, matmul, normal, total
from mpitrain.nn.sizes import expect_sizes


class Linear(Layer):
    """``y_..O = x_..I @ weight_IO + bias_O``; 2 I O operations a sample."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        deviation: float | None = None,
        split: Literal["inputs", "outputs"] | None = None,
    ) -> None:
        """Describe the layer.

        Args:
            inputs, outputs: sizes of the last axes of x and y, over all tensor ranks.
            bias: add one.
            deviation: standard deviation of the initial weights; He's by default.
            split: which of the two the ranks of a tensor group share among them (Shoeybi et al.
                2019): ``outputs`` gives each rank columns of y, ``inputs`` a part of the sum.

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
        self.deviation = deviation
        if split == "outputs":
            self.split = {"weight": 1} | ({"bias": 0} if bias else {})
        elif split == "inputs":
            self.split = {"weight": 0}

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        shape = self.shapes()["weight"]
        if self.deviation is None:
            weight = he_normal(rng, shape, self.inputs, xp, dtype)
        else:
            weight = normal(rng, shape, self.deviation, xp, dtype)
        return {"weight": weight} | ({"bias": xp.zeros(self.outputs, dtype)} if self.bias else {})

    def shapes(self) -> dict[str, Shape]:
        weight = {"weight": (self.inputs, self.outputs)}
        return weight | ({"bias": (self.outputs,)} if self.bias else {})

    def output_shape(self, shape: Shape) -> Shape:
        if not shape or shape[-1] != self.inputs:
            raise ValueError(
                f"a linear layer of {self.inputs} inputs needs them on the last axis, not {shape}"
            )
        return *shape[:-1], self.outputs

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Array]:
        y = matmul(x, parameters["weight"])
        if self.bias:
            y += parameters["bias"]
        return y, x

    def backward(
        self, parameters: Parameters, saved: Array, dy: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        return matmul(dy, parameters["weight"].T), (saved, dy)

    def gradients(self, parameters: Parameters, kept: tuple[Array, Array]) -> dict[str, Array]:
        x, dy = kept
        inputs, outputs = parameters["weight"].shape
        x_NI, dy_NO = x.reshape(-1, inputs), dy.reshape(-1, outputs)
        weight = {"weight": matmul(x_NI.T, dy_NO)}
        return weight | ({"bias": total(dy_NO, axis=0)} if self.bias else {})


class Bias(Elementwise):
    """``y_..I = x_..I + bias_I``, by itself: what is added after a sum over ranks."""

    def __init__(self, features: int) -> None:
        """``features``: size of the last axis; ``ValueError`` below 1."""
        expect_sizes("Bias", features=features)
        self.features = features

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        return {"bias": xp.zeros(self.features, dtype)}

    def shapes(self) -> dict[str, Shape]:
        return {"bias": (self.features,)}

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, None]:
        return x + parameters["bias"], None

    def backward(self, parameters: Parameters, saved: None, dy: Array) -> tuple[Array, Array]:
        return dy, dy

    def gradients(self, parameters: Parameters, kept: Array) -> dict[str, Array]:
        return {"bias": total(kept, axis=tuple(range(kept.ndim - 1)))}
