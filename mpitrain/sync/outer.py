"""Outer optimisers, which move the anchor by the workers' mean outer gradient."""

from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Array
from mpitrain.config.sync import parse_outer
from mpitrain.optim.optimizers import SGD


@dataclass(frozen=True)
class Plain:
    """Moves the anchor by the mean outer gradient, to the average of the workers' weights."""

    def step(self, anchor: Array, way: Array, velocity: Array) -> None:
        """Subtract ``way``, the mean outer gradient, from ``anchor``; both of shape (n,)."""
        anchor -= way


@dataclass(frozen=True)
class Descent:
    """Stochastic gradient descent by the mean outer gradient (Douillard et al. 2023).

    With rate 1 and no momentum it equals :class:`Plain`, bit by bit.

    Attributes:
        optimizer: with momentum, Nesterov's or not.
        lr: rate.
    """

    optimizer: SGD
    lr: float

    def step(self, anchor: Array, way: Array, velocity: Array) -> None:
        """Move ``anchor`` by ``way``, the mean outer gradient; updates ``velocity``."""
        state = {"velocity": velocity}
        direction = self.optimizer.prepare(anchor, way, state, 1)
        self.optimizer.apply(anchor, direction, state, self.lr)


Outer = Plain | Descent


def outer(text: str) -> Outer:
    """The outer optimiser of ``sync.outer``."""
    name, options = parse_outer(text)
    if name == "plain":
        return Plain()
    return Descent(SGD(options.momentum, nesterov=name == "nesterov"), options.lr)


def velocity(outer: Outer, like: Array) -> Array:
    """Array of zeros for the optimiser's velocity, like ``like``; empty if it has no momentum."""
    return np.zeros(0 if isinstance(outer, Plain) else like.size, like.dtype)
