"""DeMo: the largest waves of each chunk."""

from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

import numpy as np

from collectives.codec import Bytes, Draw
from mpitrain.arrays import Array
from mpitrain.compress.blockwise import join, number
from mpitrain.compress.memory import DecayingResidual
from mpitrain.compress.options import Named, expect_least, expect_share


@dataclass(frozen=True)
class DeMo(Named):
    """Of the cosine transform of each square chunk the largest amplitudes (Peng et al. 2024).

    Bytes: 6 an amplitude: float32 and its place in 16 bits.  Biased: what is not sent is a rank's
    momentum, m = decay m + g less what was sent, so the optimiser has none.  The paper's step is
    the sign of the mean; here it is the mean.

    Attributes:
        chunk: numbers of a chunk, a square of at most 65536.
        keep: amplitudes that are sent of each.
        decay: of what was not sent; 1 forgets nothing.
    """

    name: ClassVar[str] = "demo"
    unbiased: ClassVar[bool] = False
    chunk: int = 4096
    keep: int = 32
    decay: float = 0.999

    def __post_init__(self) -> None:
        if not (1 <= self.chunk <= 1 << 16 and isqrt(self.chunk) ** 2 == self.chunk):
            raise ValueError(f"chunk is {self.chunk}; it must be a square, at most 65536")
        expect_least("keep", self.keep, 1)
        expect_share("decay", self.decay)

    def memory(self, value: Array) -> DecayingResidual:
        return DecayingResidual(value, self.decay)

    @property
    def _kept(self) -> int:
        return min(self.keep, self.chunk)

    def nbytes(self, n: int) -> int:
        return 6 * self._kept * number(n, self.chunk)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        waves, side = cosines(isqrt(self.chunk)), isqrt(self.chunk)
        chunks = np.zeros((number(len(x), self.chunk), side, side))
        chunks.reshape(-1)[: len(x)] = x
        np.clip(chunks, -1e300, 1e300, out=chunks)  # no sum overflows
        amplitudes = (waves @ chunks @ waves.T).reshape(len(chunks), self.chunk)
        places = _largest(np.abs(amplitudes), self._kept)
        most = float(np.finfo(np.float32).max)
        values = np.clip(np.take_along_axis(amplitudes, places, 1), -most, most)
        head = 4 * values.size
        code[:head].view(np.float32)[...] = values.reshape(-1)
        code[head:].view(np.uint16)[...] = places.reshape(-1)

    def decode(self, code: Bytes, x: Array) -> None:
        waves, side = cosines(isqrt(self.chunk)), isqrt(self.chunk)
        count, head = number(len(x), self.chunk), len(code) // 6 * 4
        values = code[:head].view(np.float32).reshape(count, self._kept)
        places = code[head:].view(np.uint16).reshape(count, self._kept)
        amplitudes = np.zeros((count, self.chunk))
        np.put_along_axis(amplitudes, places.astype(np.intp), values, 1)
        most = float(np.finfo(x.dtype).max)
        chunks = waves.T @ amplitudes.reshape(count, side, side) @ waves
        join(np.clip(chunks, -most, most), x)


def _largest(size: Array, k: int) -> Array:
    """The places of the k largest of each row, of equal ones the first; rising."""
    least = np.partition(size, size.shape[1] - k, axis=1)[:, size.shape[1] - k, None]
    above, equal = size > least, size == least
    missing = k - above.sum(1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=1) <= missing))
    return np.nonzero(chosen)[1].reshape(len(size), k)


def cosines(n: int) -> Array:
    """The orthonormal cosine transform of n numbers (DCT-II) as a matrix."""
    frequency, place = np.arange(n)[:, None], np.arange(n) + 0.5
    matrix = np.sqrt(2 / n) * np.cos(np.pi / n * frequency * place)
    matrix[0] = np.sqrt(1 / n)
    return matrix
