"""What a layer is: pure functions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Gradients, Parameters, Shape
from mpitrain.kernels import kernels_of
from mpitrain.kernels.host import total
from mpitrain.nn.context import Context

__all__ = [
    "Elementwise",
    "Layer",
    "Verdict",
    "go_forward",
    "he_normal",
    "matmul",
    "normal",
    "total",
    "widened",
]


@dataclass
class Verdict:
    """What is known of a layer whose code is not ours.

    Attributes:
        examined: whether it was tried if it is a pure function.
        deferred: an error that shows in a forward pass is kept, for all ranks to raise together,
            rather than raised here.
        fault: the first that was kept.
    """

    examined: bool = False
    deferred: bool = False
    fault: ValueError | None = None

    def say(self, fault: ValueError) -> None:
        """Raise it, now or later."""
        if not self.deferred:
            raise fault
        self.fault = self.fault or fault


class Layer(ABC):
    """A differentiable function ``y = f(parameters, x)`` of a batch, with no state of its own.

    Whoever calls it owns the parameters and what the forward pass saved.  So training on stashed
    weights, recomputing activations or sharding parameters is calling it with other arguments.
    The backward pass is in two: the gradient by the input, which the layer below waits for, and
    the gradients by the parameters, for which nobody waits (zero-bubble pipelines, Qi et al. 2024).
    A batch may hold no sample at all; results then have a batch axis of length 0.

    Attributes:
        split: for each parameter that tensor parallelism cuts up, the axis along which it does.
        summed: names of the parameters whose gradients each rank of a tensor group knows only a
            part of: their sum over the group is the gradient.
        spread: names of the parameters whose parts, along axis 0, lie on the data-parallel
            replicas: a part's gradient is complete where it lies.
        tied: for each parameter that is another layer's too, its name in the model.
        sees: whether :meth:`forward` takes a :class:`~mpitrain.nn.Context` as its third argument,
            which is for what is random in training, or knows more than its own samples.
        holds: whether what the forward pass saved has the parameters in it: they must not change
            before the backward pass, which goes by them whatever it is given.
    """

    split: Mapping[str, int] = {}
    summed: frozenset[str] = frozenset()
    spread: frozenset[str] = frozenset()
    tied: Mapping[str, str] = {}
    sees = False
    holds = False

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        """Initial values, whole; the same ``rng`` state gives the same values for any ``xp``."""
        return {}

    def shapes(self) -> dict[str, Shape]:
        """Shapes of :meth:`parameters`.

        Where a layer does not say them itself, its parameters are drawn to see.
        """
        drawn = self.parameters(np.random.default_rng(0), np, np.float32)
        return {name: values.shape for name, values in drawn.items()}

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        """What the layer keeps from step to step besides its parameters, as it begins."""
        return {}

    def brought(self) -> dict[str, Array]:
        """Values that the layer brings with it rather than draws: all ranks must bring the same."""
        return {}

    def constants(self) -> dict[str, Any]:
        """Tensors of another library that it has and training leaves alone, by their names."""
        return {}

    def verdicts(self) -> list[Verdict]:
        """What is known of it and of the layers in it, of those where that must be found out."""
        return []

    @abstractmethod
    def output_shape(self, shape: Shape) -> Shape:
        """Shape of one output for one input of ``shape``; ``ValueError`` if that cannot be one."""

    @abstractmethod
    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Any]:
        """Return ``(y, saved)``; ``saved`` is for :meth:`backward` alone."""

    @abstractmethod
    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """Return ``(dx, kept)`` for ``dy``, the gradients of the loss by ``x`` and by ``y``.

        ``kept`` is for :meth:`gradients` alone.
        """

    def gradients(self, parameters: Parameters, kept: Any) -> Gradients:
        """The gradient of the loss by each parameter; None of one that had no part in it."""
        return {}


def go_forward(
    layer: Layer, name: str, parameters: Parameters, x: Array, context: Context
) -> tuple[Array, Any]:
    """``layer.forward``, of the layer that has this name within the one that ``context`` is of;
    without a name, of one that stands in its place."""
    if not layer.sees:
        return layer.forward(parameters, x)
    seeing: Any = layer.forward
    found: tuple[Array, Any] = seeing(parameters, x, context.inside(name) if name else context)
    return found


class Elementwise(Layer):
    """A layer that leaves the shape as it is."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape


def he_normal(
    rng: np.random.Generator, shape: Shape, fan_in: int, xp: ModuleType, dtype: DTypeLike
) -> Array:
    """Normal values of variance ``2 / fan_in``, which suits ReLU (He et al. 2015)."""
    return normal(rng, shape, math.sqrt(2.0 / fan_in), xp, dtype)


def normal(
    rng: np.random.Generator, shape: Shape, deviation: float, xp: ModuleType, dtype: DTypeLike
) -> Array:
    """Normal values around 0."""
    values: Array = xp.asarray(rng.normal(0.0, deviation, shape), dtype=dtype)
    return values


def widened(x: Array) -> Array:
    """x in float32 if it has 16 bits, and as it is otherwise."""
    return x.astype(np.float32) if x.dtype.itemsize <= 2 else x


def matmul(a: Array, b: Array) -> Array:
    """``a @ b``; of 16-bit floats it adds up in float32, as tensor cores do, and rounds once."""
    return kernels_of(a).matmul(a, b)
