"""Optimisers over flat arrays: what a piece of the parameters becomes, given that of the gradients.

They change parameters and state in place, element by element, so that any shard can be updated by
itself.  LARS and LAMB also need the norms of whole tensors, which the caller adds up over shards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from mpitrain.arrays import Array, Scalar
from mpitrain.kernels import kernels_of
from mpitrain.kernels.host import AdamOptions, SGDOptions, decayed, sgd_direction

#: A piece's state by name, each array of the shape and type of the piece.
State = Mapping[str, Array]


class Optimizer(Protocol):
    """How parameters follow gradients."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays of state, which are 0 at first."""

    @property
    def layerwise(self) -> bool:
        """Whether :meth:`apply` needs trust ratios."""

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        """The step's direction before the rate; may change state.  ``step`` counts from 1."""

    def ratio(self, p_norm: Scalar, g_norm: Scalar, direction_norm: Scalar) -> Scalar:
        """Trust ratio of a tensor by Euclidean norms of it, its gradient and its direction.

        Of many tensors at once, where these are arrays.
        """

    def apply(self, p: Array, direction: Array, state: State, rate: float | Array) -> None:
        """Move the parameters; ``rate`` is the learning rate, times the ratio of each element."""


@runtime_checkable
class InOne(Protocol):
    """An optimiser that takes a step in one go, which may be one kernel."""

    def take_step(
        self, p: Array, g: Array, state: State, number: int, rate: float, scale: float
    ) -> None:
        """Direction along ``scale * g`` and move; ``number`` counts from 1."""


def step_by(
    optimizer: Optimizer,
    p: Array,
    g: Array,
    state: State,
    number: int,
    rate: float,
    scale: float,
) -> None:
    """A step of any optimiser along ``scale * g``; ``g`` may be scaled in its place."""
    if isinstance(optimizer, InOne):
        optimizer.take_step(p, g, state, number, rate, scale)
        return
    if scale != 1.0:
        g *= scale
    optimizer.apply(p, optimizer.prepare(p, g, state, number), state, rate)


class _Plain:
    layerwise: ClassVar[bool] = False

    def ratio(self, p_norm: Scalar, g_norm: Scalar, direction_norm: Scalar) -> Scalar:
        return 1.0

    def apply(self, p: Array, direction: Array, state: State, rate: float | Array) -> None:
        direction *= rate
        p -= direction


@dataclass(frozen=True)
class SGD(_Plain):
    """Stochastic gradient descent with momentum.

    ``g = gradient + weight_decay * parameter``, ``v = momentum * v + g``, and the parameter moves
    by ``-lr * v``; with ``nesterov`` by ``-lr * (g + momentum * v)`` (Sutskever et al. 2013).  The
    rate is outside of the velocity, so that changing it needs no correction (Goyal et al. 2017).
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    slots: ClassVar[tuple[str, ...]] = ("velocity",)

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        return sgd_direction(p, g, state["velocity"], self._how)

    def take_step(
        self, p: Array, g: Array, state: State, number: int, rate: float, scale: float
    ) -> None:
        kernels_of(p).sgd(p, g, state["velocity"], self._how, rate, scale)

    @property
    def _how(self) -> SGDOptions:
        return SGDOptions(self.momentum, self.weight_decay, self.nesterov)


@dataclass(frozen=True)
class Adam(_Plain):
    """Adam (Kingma & Ba 2015); with ``decoupled``, AdamW (Loshchilov & Hutter 2019)."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    slots: ClassVar[tuple[str, ...]] = ("mean", "square")

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        own = state["mean"], state["square"]
        return kernels_of(p).adam_direction(p, g, *own, self._how, step)

    def take_step(
        self, p: Array, g: Array, state: State, number: int, rate: float, scale: float
    ) -> None:
        own = state["mean"], state["square"]
        kernels_of(p).adam(p, g, *own, self._how, number, rate, scale)

    @property
    def _how(self) -> AdamOptions:
        return AdamOptions(self.beta1, self.beta2, self.epsilon, self.weight_decay, self.decoupled)


@dataclass(frozen=True)
class LARS:
    """Momentum with a rate for each tensor, ``trust |p| / (|g| + weight_decay |p|)`` times lr.

    For batches of thousands (You, Gitman & Ginsburg 2017).
    """

    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float = 0.001
    slots: ClassVar[tuple[str, ...]] = ("velocity",)
    layerwise: ClassVar[bool] = True

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        return decayed(p, g, self.weight_decay)

    def ratio(self, p_norm: Scalar, g_norm: Scalar, direction_norm: Scalar) -> Scalar:
        has_none = (p_norm == 0.0) | (g_norm == 0.0)
        along = np.where(has_none, 1.0, g_norm + self.weight_decay * p_norm)
        found: Scalar = np.where(has_none, 1.0, self.trust * p_norm / along)
        return found

    def apply(self, p: Array, direction: Array, state: State, rate: float | Array) -> None:
        velocity = state["velocity"]
        velocity *= self.momentum
        velocity += rate * direction
        p -= velocity


@dataclass(frozen=True)
class LAMB(Adam):
    """AdamW's direction with a rate for each tensor, ``|p| / |direction|`` times lr (You 2020)."""

    decoupled: bool = True
    layerwise: ClassVar[bool] = True

    def ratio(self, p_norm: Scalar, g_norm: Scalar, direction_norm: Scalar) -> Scalar:
        has_none = (p_norm == 0.0) | (direction_norm == 0.0)
        along = np.where(has_none, 1.0, direction_norm)
        found: Scalar = np.where(has_none, 1.0, p_norm / along)
        return found
