"""The interface of a layer: pure functions of parameters and input."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Gradients, Parameters, Shape, is_narrow
from mpitrain.group import TensorGroup
from mpitrain.kernels import kernels_of
from mpitrain.nn.context import Context


@dataclass
class Verdict:
    """Results of the checks of a layer whose code is not ours.

    Attributes:
        compares: whether ranks that share the layer must compare it with one process's.
        deferred: whether a fault found in a forward pass is kept, for all ranks to raise together,
            rather than raised here.
        fault: the first fault that was kept.
    """

    compares: bool = False
    deferred: bool = False
    fault: ValueError | None = None

    def say(self, fault: ValueError) -> None:
        """Raise the fault, now or later."""
        if not self.deferred:
            raise fault
        self.fault = self.fault or fault


class Initial(NamedTuple):
    """Shape of a parameter, and the normal distribution that its initial values are drawn from."""

    shape: Shape
    deviation: float = 0.0
    mean: float = 0.0

    def draw(self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike) -> Array:
        """Initial values; without a deviation, ``rng`` is not used."""
        if not self.deviation:
            return xp.full(self.shape, self.mean, dtype)
        return xp.asarray(rng.normal(self.mean, self.deviation, self.shape), dtype=dtype)


class Layer(ABC):
    """A differentiable function ``y = f(parameters, x)`` of a batch, without state.

    The caller owns the parameters and the values saved by the forward pass.  Training on stashed
    weights, recomputing activations or sharding parameters is a call with other arguments.
    The backward pass has two halves: the gradient by the input, which the layer below waits for,
    and the gradients by the parameters, for which nobody waits (zero-bubble pipelines, Qi et al.
    2024).  A batch may have no samples; results then have a batch axis of length 0.

    Attributes:
        split: axis along which tensor parallelism cuts a parameter, by the parameter's name.
        fused: number of equal runs along this axis, each of which is cut, as those of queries, keys
            and values in one matrix; 1 where a parameter is not named.
        summed: parameters whose gradient is a sum over the tensor group, where each rank computes
            one term.
        spread: parameters whose rows lie on the data-parallel replicas; the gradient of a row is
            complete where the row lies.
        placed: ranks of parameters that lie whole on one rank of an expert-parallel group, by name;
            the gradient is complete there, but for those of other groups.
        tied: full name in the model of each parameter that belongs to another layer.
        sees: whether :meth:`forward` takes a :class:`~mpitrain.nn.Context` as its third argument;
            layers need it that are random in training, or depend on other ranks' samples.
        by_point: whether it works on each point of an image by itself, in training and tests, so
            that ranks can share the rows of images around it; a class says it for itself, not for
            those that are derived from it.
        holds: whether the saved values contain the parameters, which then must not change before
            the backward pass.
        repeats: whether the backward pass goes forward again, by the parameters of that time.
        adds_losses: whether it adds terms to the loss of a training step, means over samples.
        mixes: whether replicas take the moments of their samples together, as batch norm does.
        choices: rows of the table that integer inputs name, from 0 on; 0: integers are numbers, and
            come in the type of the activations; -1: the layer takes them as they are.
    """

    split: Mapping[str, int] = {}
    fused: Mapping[str, int] = {}
    summed: frozenset[str] = frozenset()
    spread: frozenset[str] = frozenset()
    placed: Mapping[str, int] = {}
    tied: Mapping[str, str] = {}
    sees = False
    by_point = False
    holds = False
    repeats = False
    adds_losses = False
    mixes = False
    choices = 0

    def __init_subclass__(cls) -> None:
        """A class's :meth:`kept` is of its own backward pass: another one takes it out of force."""
        super().__init_subclass__()
        nearest = next(one for one in cls.__mro__ if vars(one).keys() & {"backward", "kept"})
        if "kept" not in vars(nearest):
            cls.kept = Layer.kept  # type: ignore[method-assign]

    def initial(self) -> Mapping[str, Initial]:
        """Shapes and distributions of the parameters, which are drawn in this order."""
        return {}

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        """Initial values, whole; the same ``rng`` state gives the same values for any ``xp``."""
        return {name: own.draw(rng, xp, dtype) for name, own in self.initial().items()}

    def shapes(self) -> dict[str, Shape]:
        """Shapes of :meth:`parameters`; values are drawn if :meth:`initial` does not say them."""
        if known := self.initial():
            return {name: own.shape for name, own in known.items()}
        drawn = self.parameters(np.random.default_rng(0), np, np.float32)
        return {name: values.shape for name, values in drawn.items()}

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        """Initial values of arrays that change from step to step and are no parameters."""
        return {}

    def brought(self) -> dict[str, Array]:
        """Values that come with the layer instead of being drawn; all ranks must have the same."""
        return {}

    def constants(self) -> dict[str, Any]:
        """Tensors of another library that training leaves alone, by name."""
        return {}

    def verdicts(self) -> list[Verdict]:
        """Results of the checks of this layer and the layers in it whose code is not ours."""
        return []

    def shared(self, group: TensorGroup) -> "Layer":
        """The layer as the ranks of a tensor group share it, where a program brings it whole.

        Raises:
            ValueError: they cannot; the text follows the layer's name.
        """
        raise ValueError(
            f"is a {type(self).__name__}, which tensor ranks cannot share; give a torch module, or "
            "leave parallel.tensor out"
        )

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

    def kept(self, parameters: Parameters, saved: Any, dy: Array) -> Any:
        """The second result of :meth:`backward`, where nobody takes the first."""
        return self.backward(parameters, saved, dy)[1]

    def gradients(self, parameters: Parameters, kept: Any) -> Gradients:
        """Gradient of the loss by each parameter; None if the parameter had no part in the loss."""
        return {}


def go_forward(
    layer: Layer, name: str, parameters: Parameters, x: Array, context: Context
) -> tuple[Array, Any]:
    """Call ``layer.forward`` with the context that the layer sees under ``name``.

    Without a name, the layer stands in the place of the one that ``context`` belongs to.
    """
    if not layer.sees:
        return layer.forward(parameters, x)
    seeing: Any = layer.forward
    found: tuple[Array, Any] = seeing(parameters, x, context.inside(name) if name else context)
    return found


class Elementwise(Layer):
    """A layer whose output has the shape of its input."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape


def he_deviation(fan_in: int) -> float:
    """Standard deviation of initial weights before a ReLU (He et al. 2015)."""
    return sqrt(2.0 / fan_in)


def widened(x: Array) -> Array:
    """x in float32 if it has 16-bit floats, else x itself."""
    return x.astype(np.float32) if is_narrow(x.dtype) else x


def rounded(x: Array, kind: Any) -> Array:
    """x, which was computed from :func:`widened` arrays, in their type before."""
    return x.astype(kind) if is_narrow(kind) else x


def matmul(a: Array, b: Array) -> Array:
    """``a @ b`` in the type of b; 16-bit floats are added up in float32 and rounded once."""
    return kernels_of(a).matmul(a, b)
