"""Normalisation within a sample; none of it looks at other samples, so ranks need not agree."""

from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.nn.layer import Elementwise, total

#: The normalised input, and the reciprocal of its standard deviation.
_Saved = tuple[Array, Array]
#: The gradient by the output, and the normalised input.
_Kept = tuple[Array, Array]


class LayerNorm(Elementwise):
    """``weight * (x - mean) / sqrt(variance + epsilon) + bias`` over the last axis (Ba 2016)."""

    def __init__(self, features: int, *, epsilon: float = 1e-5) -> None:
        self.features = features
        self.epsilon = epsilon

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        return {"weight": xp.ones(self.features, dtype), "bias": xp.zeros(self.features, dtype)}

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.features,), "bias": (self.features,)}

    def output_shape(self, shape: Shape) -> Shape:
        if not shape or shape[-1] != self.features:
            raise ValueError(
                f"a norm over {self.features} features needs them on the last axis, not {shape}"
            )
        return shape

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, _Saved]:
        normal, scale = self._normalise(x)
        y = normal * parameters["weight"]
        y += parameters["bias"]
        return y, (normal, scale)

    def backward(self, parameters: Parameters, saved: _Saved, dy: Array) -> tuple[Array, _Kept]:
        normal, scale = saved
        dx = self._input_gradient(dy * parameters["weight"], normal, scale)
        return dx, (dy, normal)

    def gradients(self, parameters: Parameters, kept: _Kept) -> dict[str, Array]:
        dy, normal = kept
        batch_axes = tuple(range(dy.ndim - 1))
        return {"weight": total(dy * normal, axis=batch_axes), "bias": total(dy, axis=batch_axes)}

    def _normalise(self, x: Array) -> tuple[Array, Array]:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scale = 1.0 / array_namespace(x).sqrt(variance + self.epsilon)
        centred *= scale
        return centred, scale

    def _input_gradient(self, dnormal: Array, normal: Array, scale: Array) -> Array:
        along_mean = dnormal.mean(axis=-1, keepdims=True)
        along_normal = (dnormal * normal).mean(axis=-1, keepdims=True)
        dnormal -= along_mean
        dnormal -= normal * along_normal
        dnormal *= scale
        return dnormal


class GroupNorm(LayerNorm):
    """The same over the points of an image and a group of its channels (Wu & He 2018).

    Where batch normalisation would need the statistics of other ranks' samples, this needs none.
    """

    def __init__(self, groups: int, features: int, *, epsilon: float = 1e-5) -> None:
        """``ValueError`` unless ``groups`` divides ``features``."""
        if features % groups:
            raise ValueError(f"{features} channels cannot be normed in {groups} equal groups")
        super().__init__(features, epsilon=epsilon)
        self.groups = groups

    def _normalise(self, x: Array) -> tuple[Array, Array]:
        normal, scale = super()._normalise(self._by_group(x))
        return self._by_point(normal, x.shape), scale

    def _input_gradient(self, dnormal: Array, normal: Array, scale: Array) -> Array:
        dx = super()._input_gradient(self._by_group(dnormal), self._by_group(normal), scale)
        return self._by_point(dx, normal.shape)

    def _by_group(self, x_NHWC: Array) -> Array:
        n, rows, columns, _ = x_NHWC.shape
        width = self.features // self.groups
        x_NPGC = x_NHWC.reshape(n, rows * columns, self.groups, width)
        return x_NPGC.transpose(0, 2, 1, 3).reshape(n, self.groups, rows * columns * width)

    def _by_point(self, x: Array, shape: Shape) -> Array:
        n, rows, columns, _ = shape
        width = self.features // self.groups
        x_NGPC = x.reshape(n, self.groups, rows * columns, width)
        return x_NGPC.transpose(0, 2, 1, 3).reshape(shape)
