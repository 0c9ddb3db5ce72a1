"""How tests and checkpoints see workers that train by themselves."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from mpitrain.arrays import Array
from mpitrain.parallel.summation import Summation


class Strategy(Protocol):
    """Exchanges of workers that train by themselves; all methods are collective.

    Arrays are flat, in the arena's layout, of shape (arena.size,).

    Attributes:
        shared: arrays that all workers have the same, by name.
        keepers: owners of what the exchanges keep besides arrays.
        strayed: this rank's part of the squared distance of its worker's weights from the anchor
            before the last exchange, and of the anchor's squared norm; zeros once told.
    """

    shared: dict[str, Array]
    keepers: Sequence[Summation]
    strayed: tuple[float, float]

    def consensus(self) -> Array:
        """Average weights of the workers, the same bits on all."""

    def mean(self, flat: Array) -> Array:
        """Mean over the workers of flat arrays, the same bits on all."""

    def quiesce(self) -> None:
        """Complete the exchanges under way, which still take effect when due."""

    def state(self) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        """Arrays besides ``shared`` that all workers have the same, and those of this one alone,
        after :meth:`quiesce`."""

    def begin(self, steps_done: int | None = None) -> None:
        """Begin anew from weights that are the same on all workers, or go on after so many steps
        from arrays that were filled in."""

    def drain(self) -> None:
        """Give all workers the consensus; no exchange is under way afterwards."""
