"""Error feedback in units of weights."""

from collections.abc import Callable

import numpy as np

from collectives.codec import Residual
from mpitrain.arrays import Array


class UpdateResidual(Residual):
    """Residual times the learning rate of its step, which the weights still lack.

    In a later step it is added as a gradient of that step's rate.  So a rate that falls does not
    take back what was given at a higher one.  With plain gradient descent, the change of the
    weights and the residual add up to the sum of rate times gradient, for any schedule
    (dist-EF-SGD, Zheng et al. 2019).
    """

    def __init__(self, value: Array, rate: Callable[[], float]) -> None:
        """``value``: its memory, zeros at first; ``rate``: the learning rate of this step."""
        super().__init__(value)
        self._rate = rate
        self._is_added = False

    def add_to(self, x: Array) -> None:
        """Adds the residual to the gradient ``x``; at a rate of 0 it waits."""
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
