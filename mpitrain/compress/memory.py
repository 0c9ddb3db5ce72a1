"""What a rank keeps from step to step of its own gradients, beside what a code left out."""

from collections.abc import Callable

import numpy as np

from collectives.codec import Residual
from mpitrain.arrays import Array


class UpdateResidual(Residual):
    """What a code left out, times the learning rate of its step: what the weights still lack.

    In a later step it is added as a gradient of that step's rate.  So a rate that falls does not
    take back what was given at a higher one: of plain gradient descent, what the weights have moved
    by and what is left add up to the sum of rate times gradient, for any schedule (dist-EF-SGD,
    Zheng et al. 2019).
    """

    def __init__(self, value: Array, rate: Callable[[], float]) -> None:
        """``value``: memory of it, zeros at first; ``rate``: the learning rate of this step."""
        super().__init__(value)
        self._rate = rate
        self._is_added = False

    def add_to(self, x: Array) -> None:
        """``x`` becomes what there is to send; at a rate of 0 nothing would come of it."""
        rate = self._rate()
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            due = self.value / x.dtype.type(rate)
        self._is_added = bool(np.isfinite(due).all())
        if self._is_added:
            x += due

    def keep(self, x: Array, sent: Array, part: slice = slice(None)) -> None:
        super().keep(x, sent, part)
        self.pending[part] *= self._rate()
        if not self._is_added:
            self.pending[part] += self.value[part]


class LocalMomentum:
    """A rank's own mean of gradients, m = b m + (1 - b) g, which is sent instead of g.

    It has the methods of a :class:`~collectives.coded.Residual`; what is sent changes nothing.

    Attributes:
        value: m, shape (n,).
    """

    def __init__(self, value: Array, momentum: float) -> None:
        """``value``: memory of it, zeros at first."""
        self.value = value
        self._momentum, self._next = momentum, value.copy()
        self._is_pending = False

    @property
    def arrays(self) -> dict[str, Array]:
        """What a checkpoint must have, by name."""
        return {"m": self.value}

    def add_to(self, x: Array) -> None:
        """``x`` becomes what there is to send."""
        x *= 1 - self._momentum
        x += self._momentum * self.value
        self._next[...] = x
        self._is_pending = True

    def keep(self, x: Array, sent: Array, part: slice = slice(None)) -> None:
        """Of ``part``, ``x`` was there to send, and ``sent`` was."""

    def commit(self) -> None:
        """The step counts."""
        if self._is_pending:
            self.value[...] = self._next
            self._is_pending = False

    def rollback(self) -> None:
        """The step does not count."""
        self._is_pending = False
