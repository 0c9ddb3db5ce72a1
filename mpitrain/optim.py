"""Optimisers as pure functions over flat arrays: ``init`` makes the state, ``update`` a new one."""

from dataclasses import dataclass

from mpitrain.nn import Array, array_namespace


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum.

    ``g = gradient + weight_decay * parameter``, ``v = momentum * v + g``, and the parameter moves
    by ``-lr * v``; with ``nesterov`` by ``-lr * (g + momentum * v)`` (Sutskever et al. 2013).  The
    rate is outside of the velocity, so that changing it needs no correction (Goyal et al. 2017).
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def init(self, parameters: Array) -> Array:
        """The velocity at rest, of the shape and type of ``parameters``."""
        velocity: Array = array_namespace(parameters).zeros_like(parameters)
        return velocity

    def update(
        self, gradients: Array, velocity: Array, parameters: Array, lr: float
    ) -> tuple[Array, Array]:
        """Return ``(what to add to the parameters, the new velocity)``; arguments are unchanged."""
        if self.weight_decay:
            gradients = gradients + self.weight_decay * parameters
        velocity = self.momentum * velocity + gradients
        direction = gradients + self.momentum * velocity if self.nesterov else velocity
        return -lr * direction, velocity
