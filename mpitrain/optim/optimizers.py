"""Optimisers over flat arrays: they update a piece of the parameters by its gradients.

They change parameters and state in place, element by element, so that any shard can be updated by
itself.  LARS and LAMB also need the norms of whole tensors, which the caller adds up over shards.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mpitrain.arrays import Array, Scalar
from mpitrain.kernels import kernels_of
from mpitrain.kernels.host import AdamOptions, SGDOptions, decayed, sgd_direction

#: A piece's state by name, each array of the shape and type of the piece.
State = Mapping[str, Array]


class Beginning(NamedTuple):
    """State of a tensor at the beginning of a run.

    Attributes:
        steps: updates that it has had before.
        slots: whole flat arrays of state, by name.
    """

    steps: int
    slots: Mapping[str, Array]


class Optimizer(ABC):
    """How parameters follow gradients.

    Attributes:
        slots: names of the arrays of state, which are 0 at first.
        begun: other beginnings, by the name of the tensor.
        layerwise: whether :meth:`apply` needs trust ratios.
        whole: whether it takes whole parameters in their shape alone; state stays flat.
    """

    slots: tuple[str, ...] = ()
    begun: Mapping[str, Beginning] = MappingProxyType({})
    layerwise = False
    whole = False

    @abstractmethod
    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        """The step's direction before the rate; may change state.  ``step`` counts from 1."""

    def ratio(self, p_norm: Scalar, g_norm: Scalar, direction_norm: Scalar) -> Scalar:
        """Trust ratio of a tensor by Euclidean norms of it, its gradient and its direction.

        Arrays of norms give the ratios of many tensors.
        """
        return 1.0

    def apply(self, p: Array, direction: Array, state: State, rate: float | Array) -> None:
        """Move the parameters; ``rate`` is the learning rate, times the ratio of each element."""
        direction *= rate
        p -= direction

    def take_step(
        self, p: Array, g: Array, state: State, number: int, rate: float, scale: float
    ) -> None:
        """Take a step along ``scale * g``, which may be scaled in place; ``number`` >= 1."""
        if scale != 1.0:
            g *= scale
        self.apply(p, self.prepare(p, g, state, number), state, rate)


class SGD(SGDOptions, Optimizer):
    """Stochastic gradient descent with momentum.

    ``g = gradient + weight_decay * parameter``, ``v = momentum * v + g``, and the parameter moves
    by ``-lr * v``; with ``nesterov`` by ``-lr * (g + momentum * v)`` (Sutskever et al. 2013).  The
    rate is outside of the velocity, so that changing it needs no correction (Goyal et al. 2017).
    """

    slots = ("velocity",)

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        return sgd_direction(p, g, state["velocity"], self)

    def take_step(
        self, p: Array, g: Array, state: State, number: int, rate: float, scale: float
    ) -> None:
        kernels_of(p).sgd(p, g, state["velocity"], self, rate, scale)


class Adam(AdamOptions, Optimizer):
    """Adam (Kingma & Ba 2015); with ``decoupled``, AdamW (Loshchilov & Hutter 2019)."""

    slots = ("mean", "square")

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        own = state["mean"], state["square"]
        return kernels_of(p).adam_direction(p, g, *own, self, step)

    def take_step(
        self, p: Array, g: Array, state: State, number: int, rate: float, scale: float
    ) -> None:
        own = state["mean"], state["square"]
        kernels_of(p).adam(p, g, *own, self, number, rate, scale)


@dataclass(frozen=True)
class LARS(Optimizer):
    """Momentum with a rate for each tensor, ``trust |p| / (|g| + weight_decay |p|)`` times lr.

    For batches of thousands (You, Gitman & Ginsburg 2017).
    """

    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float = 0.001
    slots = ("velocity",)
    layerwise = True

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
    layerwise = True

    def ratio(self, p_norm: Scalar, g_norm: Scalar, direction_norm: Scalar) -> Scalar:
        has_none = (p_norm == 0.0) | (direction_norm == 0.0)
        along = np.where(has_none, 1.0, direction_norm)
        found: Scalar = np.where(has_none, 1.0, p_norm / along)
        return found
