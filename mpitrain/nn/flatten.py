"""Layers that only move or forget axes."""

import math

from mpitrain.arrays import Array, Parameters, Shape
from mpitrain.nn.layer import Layer


class Flatten(Layer):
    """All axes but the batch's made one: x_N... to y_NI."""

    def output_shape(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Shape]:
        # Not reshape(n, -1): for a batch without samples -1 could be any length.
        return x.reshape(len(x), math.prod(x.shape[1:])), x.shape

    def backward(self, parameters: Parameters, saved: Shape, dy: Array) -> tuple[Array, None]:
        return dy.reshape(saved), None
