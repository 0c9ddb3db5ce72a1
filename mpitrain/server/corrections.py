"""What a server does about gradients that were computed on older parameters.

A :class:`Correction` is asked twice: when a worker pulls, and when its push has come.  The *lag* of
a push (tau in the papers) is the number of pushes that the server has applied since it sent the
parameters that the gradient was computed on.
"""

from collections.abc import Callable
from typing import Protocol

from mpitrain.arrays import Array
from mpitrain.config import Server
from mpitrain.optim.optimizers import State


class Correction(Protocol):
    """How a server meets staleness."""

    def on_pull(self, sent: Array, state: State, rate: float) -> None:
        """Change in place what is sent: a copy of the server's parameters.

        Args:
            sent: the copy, of shape (elements of the server,).
            state: the optimiser's arrays.
            rate: the learning rate now.
        """

    def on_push(self, gradient: Array, lag: int, pulled: Array, now: Array) -> float:
        """Change a gradient in place, and return a factor on the learning rate.

        Args:
            gradient: as pushed, of shape (elements of the server,).
            lag: pushes that were applied since the pull.
            pulled: what this worker was sent.
            now: the server's parameters.
        """


class AsItIs:
    """No correction: Downpour (Dean et al. 2012)."""

    def on_pull(self, sent: Array, state: State, rate: float) -> None:
        pass

    def on_push(self, gradient: Array, lag: int, pulled: Array, now: Array) -> float:
        return 1.0


class SmallerRate(AsItIs):
    """The rate divided by 1 + lag (Zhang et al. 2016, who divide by the lag, counted from 1)."""

    def on_push(self, gradient: Array, lag: int, pulled: Array, now: Array) -> float:
        return 1.0 / (1.0 + lag)


class DelayCompensation(AsItIs):
    """``g + strength * g * g * (now - pulled)``: what the gradient is by now, to first order.

    DC-ASGD (Zheng et al. 2017), where g * g stands for the diagonal of the Hessian.  With a lag of
    0 the gradient stays as it is, bit by bit.
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


class Prediction(AsItIs):
    """Workers pull ``w - rate * E[lag] * velocity``, where momentum will have taken w by then.

    E[lag] is the mean of the lags since the last meeting, with one of ``usual`` before them, so
    that it depends on the order of service alone (SpecTrain, Chen et al. 2018, for pipelines).
    """

    def __init__(self, usual: int) -> None:
        """``usual``: the lag where all groups are equally fast, one less than there are groups."""
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
            return AsItIs
        case "rate":
            return SmallerRate
        case "delay":
            return lambda: DelayCompensation(server.compensation)
        case "predict":
            return lambda: Prediction(groups - 1)
