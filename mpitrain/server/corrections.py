"""Corrections of a server: for gradients computed on older parameters, and for weight decay.

A :class:`Correction` is asked when a worker pulls, and when its push has come.  The *lag* of a push
(tau in the papers) is the number of pushes that the server has applied since it sent the parameters
on which the gradient was computed.
"""

from collections.abc import Callable
from dataclasses import replace

from mpitrain.arrays import Array
from mpitrain.config import Server
from mpitrain.optim.groups import Grouping, ParameterGroup
from mpitrain.optim.optimizers import Adam, State


class Correction:
    """How a server meets staleness; this one does nothing: Downpour (Dean et al. 2012)."""

    def on_pull(self, sent: Array, state: State, rate: float) -> None:
        """Change ``sent``, the copy of the parameters for a worker, of shape (elements,)."""

    def on_push(self, gradient: Array, lag: int, pulled: Array, now: Array) -> float:
        """Change a gradient of shape (elements,) in place; return a factor on the learning rate.

        ``pulled``: the parameters that its worker was sent; ``now``: the present ones.
        """
        return 1.0


class SmallerRate(Correction):
    """The rate divided by 1 + lag (Zhang et al. 2016, who divide by the lag, counted from 1)."""

    def on_push(self, gradient: Array, lag: int, pulled: Array, now: Array) -> float:
        return 1.0 / (1.0 + lag)


class DelayCompensation(Correction):
    """``g + strength * g * g * (now - pulled)``: the present gradient, to first order.

    DC-ASGD (Zheng et al. 2017) takes g * g for the diagonal of the Hessian.  With a lag of 0 the
    gradient stays as it is, bit by bit.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def on_push(self, gradient: Array, lag: int, pulled: Array, now: Array) -> float:
        if lag:
            moved = now - pulled
            moved *= gradient
            moved *= gradient
            moved *= self.strength
            gradient += moved
        return 1.0


class Prediction(Correction):
    """Workers pull ``w - rate * E[lag] * velocity``, to which momentum will have moved w by then.

    E[lag] is the mean of the lags since the last meeting and of one lag of ``usual``, so that it
    depends on the order of service alone (SpecTrain, Chen et al. 2018, for pipelines).
    """

    def __init__(self, usual: int) -> None:
        """``usual``: the lag if all groups are equally fast, one less than their number."""
        self._sum, self._count = usual, 1

    def on_pull(self, sent: Array, state: State, rate: float) -> None:
        if self._sum:
            sent -= rate * (self._sum / self._count) * state["velocity"]

    def on_push(self, gradient: Array, lag: int, pulled: Array, now: Array) -> float:
        self._sum += lag
        self._count += 1
        return 1.0


def correction(server: Server, groups: int) -> Callable[[], Correction]:
    """Makes the correction of a job, anew after each meeting."""
    match server.correct:
        case "none":
            return Correction
        case "rate":
            return SmallerRate
        case "delay":
            return lambda: DelayCompensation(server.compensation)
        case "predict":
            return lambda: Prediction(groups - 1)


def with_decay_in_parts(usual: Grouping, part: float) -> Grouping:
    """Groups with ``part`` of the weight decay in each push, so that a step has all of it.

    AdamW's decay stays: each push is a step of the whole rate there, and its decay a part of that
    step.
    """
    known: dict[int, ParameterGroup] = {}

    def grouped(name: str) -> ParameterGroup:
        found = usual(name)
        optimizer = found.optimizer
        if isinstance(optimizer, Adam) and optimizer.decoupled:
            return found
        if id(found) not in known:
            decay = optimizer.weight_decay * part  # type: ignore[attr-defined]
            scaled = replace(optimizer, weight_decay=decay)  # type: ignore[type-var]
            known[id(found)] = replace(found, optimizer=scaled)
        return known[id(found)]  # one group for equal tensors, which are updated together

    return grouped
