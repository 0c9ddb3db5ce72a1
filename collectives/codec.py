"""The protocol of codecs, and the memories that ranks keep beside them; no MPI."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
#: Makes the random numbers of one message.
Draw = Callable[[], np.random.Generator]


class Codec(Protocol):
    """A lossy code for vectors of floating-point numbers.

    Attributes:
        unbiased: whether its mean over the dice is the vector, so that it needs no error feedback.
    """

    @property
    def unbiased(self) -> bool: ...

    def nbytes(self, n: int) -> int:
        """Bytes of the code of ``n`` numbers, and of its message."""

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        """Writes the code of ``x``, of shape (n,), whose numbers are finite.

        Args:
            code: shape (nbytes(n),); every byte is written.
            draw: random numbers, the same for the same step, rank and message.
        """

    def decode(self, code: Bytes, x: Array) -> None:
        """Decodes ``code`` into ``x``, of shape (n,)."""


@dataclass
class Dice:
    """Random numbers that depend on nothing but these numbers, so that a run can be repeated.

    Attributes:
        seed: the run's.
        replica: the replica whose numbers are encoded.
        step: the run's; the owner of the dice counts it.
    """

    seed: int = 0
    replica: int = 0
    step: int = 0

    def draw(self, place: int, part: int) -> np.random.Generator:
        """The generator for ``part`` of the sum at ``place``; both at least 0."""
        counter = [0, part, place, self.step]
        return np.random.Generator(np.random.Philox(key=[self.seed, self.replica], counter=counter))


def bounded(ufunc: np.ufunc, a: Array, b: Array, out: Array) -> None:
    """``ufunc(a, b, out=out)``, where a sum of finite numbers ends at the largest number.

    The residual of numbers near the largest one may be larger still, and would stay infinite.
    """
    overflowed: list[object] = []
    with np.errstate(over="call", call=lambda *_: overflowed.append(None)):
        ufunc(a, b, out=out)
    if overflowed:
        most = np.finfo(out.dtype).max
        np.clip(out, -most, most, out=out)


class Residual:
    """The part that a codec left out, which is added to the next numbers (error feedback).

    Over the steps, what was sent and what is left add up to what was given (Seide et al. 2014;
    Karimireddy et al. 2019).  A step's residual takes effect with :meth:`commit`; a step that is
    skipped calls :meth:`rollback`.

    Attributes:
        value: shape (n,).
        pending: its value after :meth:`commit`.
    """

    def __init__(self, value: Array) -> None:
        """``value``: its memory, zeros at first."""
        self.value = value
        self.pending = value.copy()
        self._is_pending = False

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of a checkpoint, by name."""
        return {"residual": self.value}

    def add_to(self, x: Array) -> None:
        """Adds what was left out before to ``x``."""
        bounded(np.add, x, self.value, x)

    def keep(self, x: Array, sent: Array, part: slice = slice(None)) -> None:
        """Stores the residual ``x - sent`` for the elements in ``part``."""
        bounded(np.subtract, x, sent, self.pending[part])
        self._is_pending = True

    def give_back(self, places: Array, values: Array) -> None:
        """Adds ``values``, which were sent and then dropped on the way; after :meth:`keep`.

        Args:
            places: shape (dropped,), each once.
            values: shape (dropped,), which may have parts of other ranks.
        """
        found = self.pending[places]
        bounded(np.add, found, values, found)
        self.pending[places] = found

    def commit(self) -> None:
        """The step takes effect."""
        if self._is_pending:
            self.value[...] = self.pending
            self._is_pending = False

    def rollback(self) -> None:
        """The step is skipped."""
        self._is_pending = False


def shards(n: int, size: int) -> list[int]:
    """Elements of each rank's shard of ``n``: as equal as can be, the first ones longer."""
    length, longer = divmod(n, size)
    return [length + (rank < longer) for rank in range(size)]


def slices(lengths: Iterable[int]) -> list[slice]:
    """The elements of shards of these lengths, one behind the other."""
    return [slice(low, high) for low, high in pairwise(accumulate(lengths, initial=0))]
