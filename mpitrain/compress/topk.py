"""The largest elements."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress.options import Named, expect_least, expect_share, kept_of

Indices = np.ndarray[tuple[int], np.dtype[np.uint32]]
#: Stride of the sample that guesses where the largest elements begin.
_STRIDE = 128
#: Stages of the warm-up, in which the share falls to that which is kept.
_STAGES = 4


def largest(x: Array, k: int) -> Indices:
    """The k elements of ``x`` that are largest in size, of equal ones the first; rising, uint32.

    A sample guesses a threshold that some more than k elements exceed, and the largest are searched
    among these (Lin et al. 2018).  A bad guess costs time and changes nothing.
    Cost: about two passes over ``x``, of shape (n,) and finite, and k log k.
    """
    if k in (0, len(x)):
        return np.arange(k, dtype=np.uint32)
    size = np.abs(x)
    candidates = _above_a_guess(size, k)
    if candidates is not None:
        return candidates[_exactly(size[candidates], k)].astype(np.uint32)
    return _exactly(size, k).astype(np.uint32)


def _above_a_guess(size: Array, k: int) -> Array | None:
    """Elements at or above a guessed threshold; None if they are fewer than k."""
    sample = size[::_STRIDE]
    wanted = -(-5 * k // (4 * _STRIDE)) + 4  # somewhat more than its share
    if wanted >= len(sample):
        return None
    guess = np.partition(sample, len(sample) - wanted)[len(sample) - wanted]
    found = np.flatnonzero(size >= guess)
    return found if len(found) >= k else None


def _exactly(size: Array, k: int) -> Array:
    """The k largest, of equal ones the first; rising."""
    if k == len(size):
        return np.arange(k)
    least = np.partition(size, len(size) - k)[len(size) - k]
    above = size > least
    equal = np.flatnonzero(size == least)[: k - int(above.sum())]
    return np.sort(np.concatenate([np.flatnonzero(above), equal]))


@dataclass(frozen=True)
class TopK(Named):
    """The largest numbers in size, exactly (Aji and Heafield 2017; Alistarh et al. 2018).

    The first of equal ones are taken, so that every machine takes the same.  Bytes: 6 a pair, with
    a gap of 16 bits in the place of an index.
    Biased: with feedback, which keeps at most 1 - keep of a vector's square.

    Attributes:
        keep: share of the elements that is sent; at least one is.
        warmup: first steps, in whose four quarters more is sent: keep to the power of 1/5, 2/5,
            3/5 and 4/5, as 25%, 6.3%, 1.6% and 0.4% for 0.1% (Lin et al. 2018).
    """

    name: ClassVar[str] = "topk"
    unbiased: ClassVar[bool] = False
    keep: float = 0.01
    warmup: int = 0

    def __post_init__(self) -> None:
        expect_share("keep", self.keep)
        expect_least("warmup", self.warmup, 0)

    def keep_at(self, step: int) -> float:
        """Share of the elements that is sent in ``step``, counted from 0."""
        if step >= self.warmup:
            return self.keep
        stage = _STAGES * step // self.warmup
        return float(self.keep ** ((stage + 1) / (_STAGES + 1)))

    def select(self, x: Array, step: int) -> Indices:
        return largest(x, kept_of(len(x), self.keep_at(step)))
