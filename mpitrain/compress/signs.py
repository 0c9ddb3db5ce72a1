"""Signs: a bit a number."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from collectives.codec import Bytes, Draw
from mpitrain.arrays import Array
from mpitrain.compress.blockwise import (
    join,
    lengths,
    normalised,
    number,
    read_scales,
    single,
    split,
    write_scales,
)
from mpitrain.compress.feedback import SentMomentum
from mpitrain.compress.options import Named, expect_block, expect_decay
from mpitrain.compress.packing import packed


@dataclass(frozen=True)
class Sign(Named):
    """Signs with one scale a block; the sign of 0 is + (Karimireddy et al. 2019).

    Bytes: n/8 + 4 a block.  Biased: with feedback.  The mean of sizes leaves
    |a|^2 (1 - |a|_1^2 / (n |a|_2^2)), never more than there was.

    Attributes:
        block: elements with one scale; 0 for all of a message.
    """

    name: ClassVar[str] = "sign"
    unbiased: ClassVar[bool] = False
    block: int = 0

    def __post_init__(self) -> None:
        expect_block(self.block, may_be_all=True)

    def nbytes(self, n: int) -> int:
        return 4 * number(n, self.block) + packed(n, 1)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        rows = split(x, self.block)
        most, parts = normalised(rows)
        means = np.abs(parts).sum(1) / lengths(len(x), self.block)
        write_scales(code, single(most[:, 0] * means))[...] = np.packbits(x >= 0)

    def decode(self, code: Bytes, x: Array) -> None:
        scales, bits = read_scales(code, number(len(x), self.block))
        rows = split(_signs(bits, len(x)), self.block)
        join(rows * scales.astype(x.dtype)[:, None], x)


@dataclass(frozen=True)
class OneBit(Named):
    """Signs with two values a block, the means of what is below 0 and of the rest.

    1-bit SGD (Seide et al. 2014).  There a block is a column of a weight matrix, the weights of
    one neuron.  Messages are flat: a block here is ``block`` consecutive elements, a row of a
    matrix where ``block`` is its length.  Bytes: n/8 + 8 a block.  Biased:
    with feedback, without which it does not converge.  No other codec of signs with two
    values leaves less.

    Attributes:
        block: elements with two values; 0 for all of a message.
    """

    name: ClassVar[str] = "onebit"
    unbiased: ClassVar[bool] = False
    block: int = 512

    def __post_init__(self) -> None:
        expect_block(self.block, may_be_all=True)

    def nbytes(self, n: int) -> int:
        return 8 * number(n, self.block) + packed(n, 1)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        rows = split(x, self.block)
        most, parts = normalised(rows)
        sums = np.stack([-np.minimum(parts, 0).sum(1), np.maximum(parts, 0).sum(1)], 1)
        below = (rows < 0).sum(1)
        counts = np.stack([below, lengths(len(x), self.block) - below], 1)
        means = most * (sums / np.maximum(counts, 1))
        write_scales(code, single(means) * np.array([-1, 1], np.float32))[...] = np.packbits(x >= 0)

    def decode(self, code: Bytes, x: Array) -> None:
        means, bits = read_scales(code, 2 * number(len(x), self.block))
        pairs = means.astype(x.dtype).reshape(-1, 2)
        rows = split(np.unpackbits(bits, count=len(x)), self.block)
        join(np.where(rows, pairs[:, 1:], pairs[:, :1]), x)


@dataclass(frozen=True)
class Signum(Named):
    """A vote of signs, each the sign of a rank's own momentum (Bernstein et al. 2018).

    A code stands for +1 or -1 a number.  In a two-phase exchange an owner adds those of all ranks
    and sends the sign of the sum: the majority's sign, and + where ranks are divided equally.
    Bytes: n/8 each way.  Biased, without feedback: the vote has no size, so the rate is one for
    Adam, and the optimiser needs no momentum.  A minority cannot turn an element in which the
    others agree.

    Attributes:
        momentum: decay of a rank's own mean of gradients; 0 is signSGD.
    """

    name: ClassVar[str] = "signum"
    unbiased: ClassVar[bool] = False
    feedback: ClassVar[str] = "never"
    votes: ClassVar[bool] = True
    momentum: float = 0.9

    def __post_init__(self) -> None:
        expect_decay("momentum", self.momentum)

    def memory(self, value: Array) -> SentMomentum:
        """A rank's own mean of gradients, m = b m + (1 - b) g."""

        def follow(m: Array, g: Array, next_m: Array) -> Array:
            np.multiply(g, 1 - self.momentum, out=next_m)
            next_m += self.momentum * m
            return next_m

        return SentMomentum(value, "m", follow)

    def nbytes(self, n: int) -> int:
        return packed(n, 1)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        code[...] = np.packbits(x >= 0)

    def decode(self, code: Bytes, x: Array) -> None:
        x[...] = _signs(code, len(x))


def _signs(bits: Bytes, n: int) -> Array:
    """-1 or 1 of each bit; int8."""
    return 2 * np.unpackbits(bits, count=n).view(np.int8) - 1
