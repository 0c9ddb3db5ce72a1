"""Affine map of the last axis."""

from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.nn.layer import Array, Layer, Parameters, Shape, he_normal


class Linear(Layer):
    """``y_..O = x_..I @ weight_IO + bias_O``; 2 I O operations a sample."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.inputs = inputs
        self.outputs = outputs

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        return {
            "weight": he_normal(rng, (self.inputs, self.outputs), self.inputs, xp, dtype),
            "bias": xp.zeros(self.outputs, dtype),
        }

    def output_shape(self, shape: Shape) -> Shape:
        if not shape or shape[-1] != self.inputs:
            raise ValueError(
                f"a linear layer of {self.inputs} inputs needs them on the last axis, not {shape}"
            )
        return *shape[:-1], self.outputs

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Array]:
        return x @ parameters["weight"] + parameters["bias"], x

    def backward(
        self, parameters: Parameters, saved: Array, dy: Array
    ) -> tuple[Array, dict[str, Array]]:
        x_NI = saved.reshape(-1, self.inputs)
        dy_NO = dy.reshape(-1, self.outputs)
        return dy @ parameters["weight"].T, {"weight": x_NI.T @ dy_NO, "bias": dy_NO.sum(axis=0)}
