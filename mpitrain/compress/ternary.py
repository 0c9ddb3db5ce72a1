"""Three values a number."""

from dataclasses import dataclass
from typing import ClassVar

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
from mpitrain.compress.packing import pack_trits, packed_trits, unpack_trits


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
