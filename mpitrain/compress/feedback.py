"""Memories that ranks keep beside a codec in place of a plain residual."""

from collections.abc import Callable

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
