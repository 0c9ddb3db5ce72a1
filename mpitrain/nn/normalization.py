"""Normalisation over features; none of it looks at other samples, so ranks need not agree."""

from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.nn.layer import Array, Layer, Parameters, Shape, array_namespace

#: The normalised input, and the reciprocal of its standard deviation.
_Saved = tuple[Array, Array]


class LayerNorm(Layer):
    """``weight * (x - mean) / sqrt(variance + epsilon) + bias`` over the last axis (Ba 2016)."""

    def __init__(self, features: int, *, epsilon: float = 1e-5) -> None:
        self.features = features
        self.epsilon = epsilon

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        return {"weight": xp.ones(self.features, dtype), "bias": xp.zeros(self.features, dtype)}

    def output_shape(self, shape: Shape) -> Shape:
        if not shape or shape[-1] != self.features:
            raise ValueError(
                f"layer norm over {self.features} features needs them last, not {shape}"
            )
        return shape

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, _Saved]:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scale = 1.0 / array_namespace(x).sqrt(variance + self.epsilon)
        normal = centred * scale
        return normal * parameters["weight"] + parameters["bias"], (normal, scale)

    def backward(
        self, parameters: Parameters, saved: _Saved, dy: Array
    ) -> tuple[Array, dict[str, Array]]:
        normal, scale = saved
        batch_axes = tuple(range(dy.ndim - 1))
        gradients = {"weight": (dy * normal).sum(axis=batch_axes), "bias": dy.sum(axis=batch_axes)}
        dnormal = dy * parameters["weight"]
        along_mean = dnormal.mean(axis=-1, keepdims=True)
        along_normal = (dnormal * normal).mean(axis=-1, keepdims=True)
        return scale * (dnormal - along_mean - normal * along_normal), gradients
