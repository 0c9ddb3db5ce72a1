"""Codecs that round at random to levels between 0 and a norm."""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Literal

import numpy as np

from collectives.codec import Bytes, Draw
from mpitrain.arrays import Array
from mpitrain.compress.blockwise import (
    covering,
    join,
    lengths,
    normalised,
    number,
    ratios,
    read_scales,
    single,
    split,
    times,
    write_scales,
)
from mpitrain.compress.integers import round_by_dice
from mpitrain.compress.options import Named, expect_block, expect_least
from mpitrain.compress.packing import pack, pack_trits, packed, packed_trits, unpack, unpack_trits


@dataclass(frozen=True)
class TernGrad(Named):
    """-s, 0 or s, by dice: s with probability |a|/s, s the largest |a| (Wen et al. 2017).

    Bytes: n/5 + 4 a block.  Unbiased, variance |a| (s - |a|) a number, so without feedback, which
    would diverge; clipped, its mean over the dice is the clipped vector.  The variance is large:
    for big batches, and not for last layers.

    Attributes:
        block: elements with one scale; 0 for all of a message.
        clip: bound of sizes in standard deviations of their block, the paper's is 2.5; 0 for
            none.
    """

    name: ClassVar[str] = "terngrad"
    unbiased: ClassVar[bool] = True
    feedback: ClassVar[str] = "never"
    block: int = 0
    clip: float = 0.0

    def __post_init__(self) -> None:
        expect_block(self.block, may_be_all=True)
        expect_least("clip", self.clip, 0)

    def nbytes(self, n: int) -> int:
        return 4 * number(n, self.block) + packed_trits(n)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        rows = split(x, self.block)
        scales = covering(np.abs(rows).max(1, initial=0))
        if self.clip:
            scales = np.minimum(scales, single(self._limits(rows, len(x))))
        trits = round_by_dice(ratios(rows, scales, 1), draw)
        pack_trits(trits.reshape(-1)[: len(x)] + 1, write_scales(code, scales))

    def decode(self, code: Bytes, x: Array) -> None:
        scales, trits = read_scales(code, number(len(x), self.block))
        rows = split(unpack_trits(trits, len(x)).astype(np.int8) - 1, self.block)
        join(rows * scales.astype(x.dtype)[:, None], x)

    def _limits(self, rows: Array, n: int) -> Array:
        """``clip`` standard deviations of the numbers of each block."""
        most, parts = normalised(rows)
        counts = lengths(n, self.block)
        mean = parts.sum(1) / counts
        square = (parts * parts).sum(1) / counts
        return times(most[:, 0], self.clip * np.sqrt(np.maximum(square - mean * mean, 0)))


@dataclass(frozen=True)
class QSGD(Named):
    """Multiples of norm/levels, the one below or above by dice (Alistarh et al. 2017).

    Bytes: (1 + ceil(log2(levels + 1))) n/8 + 4 a block.  Unbiased; the variance of a number is
    (norm/levels)^2 f (1 - f), f its place between two levels, and that of a block at most omega
    times its square, omega = min(block/(4 levels^2), sqrt(block)/levels).  Above 1, feedback would
    let the residual grow: ``damped`` multiplies by 1/(1 + omega), which leaves less than there was.

    Attributes:
        levels: above 0; at most 32767.
        block: elements with one norm; 0 for all of a message.
        norm: "l2", or "max", whose levels are closer.
        damped: multiplied by 1/(1 + omega), biased, with feedback.
    """

    name: ClassVar[str] = "qsgd"
    levels: int = 7
    block: int = 512
    norm: Literal["l2", "max"] = "l2"
    damped: bool = False

    def __post_init__(self) -> None:
        expect_block(self.block, may_be_all=True)
        if not 1 <= self.levels <= 32767:
            raise ValueError(f"levels is {self.levels}; it must be from 1 to 32767")

    @property
    def unbiased(self) -> bool:
        return not self.damped

    @property
    def feedback(self) -> str:
        return "on" if self.damped else "never"

    @property
    def _bits(self) -> int:
        """Bits of a sign and a level."""
        return 1 + self.levels.bit_length()

    def omega(self, n: int) -> float:
        """Bound of the variance of a vector of n over its square."""
        block = min(n, self.block or n)
        return min(block / (4 * self.levels**2), sqrt(block) / self.levels)

    def nbytes(self, n: int) -> int:
        return 4 * number(n, self.block) + packed(n, self._bits)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        rows = split(x, self.block)
        norms = self._norms(rows)
        units = ratios(rows, norms, 1) * self.levels
        steps = round_by_dice(units, draw).reshape(-1)[: len(x)]
        values = np.abs(steps).astype(np.uint16) << 1 | (steps < 0)
        pack(values, self._bits, write_scales(code, norms))

    def decode(self, code: Bytes, x: Array) -> None:
        norms, rest = read_scales(code, number(len(x), self.block))
        values = unpack(rest, len(x), self._bits)
        signs = 1 - 2 * (values & 1).astype(np.int16)
        steps = split((values >> 1).astype(np.int16) * signs, self.block)
        factor = 1 / self.levels / (1 + self.omega(len(x)) if self.damped else 1)
        join(steps * (norms.astype(np.float64) * factor)[:, None], x)

    def _norms(self, rows: Array) -> Array:
        most, parts = normalised(rows)
        if self.norm == "max":
            return covering(most[:, 0])
        return covering(times(most[:, 0], np.sqrt((parts * parts).sum(1))))
