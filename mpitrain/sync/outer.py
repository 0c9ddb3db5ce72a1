"""The outer optimiser: what becomes of the anchor, given the mean way of the workers."""

from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Array
from mpitrain.config.sync import parse_outer
from mpitrain.optim.optimizers import SGD


@dataclass(frozen=True)
class Plain:
    """The anchor takes the way: it becomes the average of the workers' weights."""

    def step(self, anchor: Array, way: Array, velocity: Array) -> None:
        """Move ``anchor`` by minus the way, shape (n,)."""
        anchor -= way


@dataclass(frozen=True)
class Descent:
    """Stochastic gradient descent for which the way is the gradient (Douillard et al. 2023).

    With rate 1 and no momentum it is :class:`Plain`, bit by bit.

    Attributes:
        optimizer: with momentum, Nesterov's or not.
        lr: rate.
    """

    optimizer: SGD
    lr: float

    def step(self, anchor: Array, way: Array, velocity: Array) -> None:
        """Move ``anchor``; ``velocity`` is that of these elements."""
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
    """Memory of its velocity, zeros: as large as ``like``, or none."""
    return np.zeros(0 if isinstance(outer, Plain) else like.size, like.dtype)
