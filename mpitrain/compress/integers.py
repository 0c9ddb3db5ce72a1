"""Integers with a scale a block."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from collectives.codec import Bytes, Draw
from mpitrain.arrays import Array
from mpitrain.compress.blockwise import (
    covering,
    join,
    limit,
    number,
    power_above,
    power_below,
    ratios,
    read_scales,
    split,
    write_scales,
)
from mpitrain.compress.options import Named, expect_block
from mpitrain.compress.packing import pack, packed, unpack


def round_by_dice(ratios: Array, draw: Draw) -> Array:
    """Whole numbers next below or above ``ratios``; their mean over the dice is ``ratios``."""
    lower = np.floor(ratios)
    dice = draw().random(ratios.shape, np.float32)
    lower += dice < ratios - lower
    return lower


@dataclass(frozen=True)
class _Integers(Named):
    """Integers of ``bits`` bits, from -most to most; a block's scale is its largest over most.

    Attributes:
        block: elements with one scale; 0 for all.
        rounding: "nearest", biased; or "stochastic", unbiased: up or down by dice.
        power: scales are powers of two, so that sent and residual parts of dyadic numbers add up
            exactly.  Steps are up to twice as long.
    """

    bits: ClassVar[int]
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    power: bool = False

    def __post_init__(self) -> None:
        expect_block(self.block, may_be_all=True)

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def _most(self) -> int:
        return (1 << self.bits - 1) - 1

    def nbytes(self, n: int) -> int:
        return 4 * number(n, self.block) + packed(n, self.bits)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        rows, most = split(x, self.block), self._most
        scales = np.minimum(covering(np.abs(rows).max(1, initial=0) / most), limit(most))
        if self.power:
            scales = np.minimum(power_above(scales), power_below(limit(most)))
        units = ratios(rows, scales, most)
        steps = round_by_dice(units, draw) if self.unbiased else np.rint(units)
        flat = steps.reshape(-1)[: len(x)].astype(np.int8)
        rest = write_scales(code, scales)
        if self.bits == 8:
            rest.view(np.int8)[...] = flat
        else:
            pack((flat + most).astype(np.uint8), self.bits, rest)

    def decode(self, code: Bytes, x: Array) -> None:
        scales, rest = read_scales(code, number(len(x), self.block))
        if self.bits == 8:
            steps = rest.view(np.int8)
        else:
            steps = unpack(rest, len(x), self.bits).astype(np.int8) - np.int8(self._most)
        join(split(steps, self.block) * scales.astype(x.dtype)[:, None], x)


@dataclass(frozen=True)
class Int8(_Integers):
    """Integers from -127 to 127 with a scale a block, symmetric about 0.

    Bytes: n + 4 a block.  Error of a number: at most half a step to the nearest, a step with
    dice; a step is 1/127 of the block's largest.  Codec of ZeRO++ (Wang et al. 2023) and
    of INTELLECT-1's pseudo-gradients (2024).
    """

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(_Integers):
    """Integers from -7 to 7 with a scale a block, two in a byte.

    Bytes: n/2 + 4 a block.  Error of a number: at most half a step to the nearest, a step
    with dice; a step is 1/7 of the block's largest.  DiLoCo's pseudo-gradients need only 4 bits
    (Douillard et al. 2025).
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
