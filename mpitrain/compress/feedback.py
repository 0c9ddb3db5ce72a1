"""Memories that ranks keep beside a codec in place of a plain residual."""

from collections.abc import Callable

import numpy as np

from collectives.codec import Residual
from mpitrain.arrays import Array


class SentMomentum(Residual):
    """A momentum that is sent in place of the gradient, and does not depend on what was sent."""

    def __init__(
        self, value: Array, name: str, follow: Callable[[Array, Array, Array], Array]
    ) -> None:
        """``value``: memory of what ``arrays`` call ``name``, zeros at first.

        ``follow`` writes the next momentum to its third argument, from the present one and the
        gradient, and returns what is sent.
        """
        super().__init__(value)
        self._name, self._follow = name, follow

    @property
    def arrays(self) -> dict[str, Array]:
        return {self._name: self.value}

    def add_to(self, x: Array) -> None:
        """Replaces the gradient ``x`` by what is sent."""
        x[...] = self._follow(self.value, x, self.pending)
        self._is_pending = True

    def keep(self, x: Array, sent: Array, part: slice = slice(None)) -> None:
        """Keeps nothing."""


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
