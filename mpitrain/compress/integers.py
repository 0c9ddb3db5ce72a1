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
    ratios,
    read_scales,
    split,
    write_scales,
)
from mpitrain.compress.options import Named, expect_block

_MOST = 127


def round_by_dice(ratios: Array, draw: Draw) -> Array:
    """Whole numbers next below or above ``ratios``; their mean over the dice is ``ratios``."""
    lower = np.floor(ratios)
    dice = draw().random(ratios.shape, np.float32)
    lower += dice < ratios - lower
    return lower


@dataclass(frozen=True)
class Int8(Named):
    """Integers from -127 to 127 with a scale a block, symmetric about 0.

    Bytes: n + 4 a block.  Error of a number: at most half a step to the nearest, a step with
    dice; a step is 1/127 of the block's largest.  Codec of ZeRO++ (Wang et al. 2023) and
    of INTELLECT-1's pseudo-gradients (2024).

    Attributes:
        block: elements with one scale; 0 for all.
        rounding: "nearest", biased; or "stochastic", unbiased: up or down by dice.
    """

    name: ClassVar[str] = "int8"
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        expect_block(self.block, may_be_all=True)

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    def nbytes(self, n: int) -> int:
        return 4 * number(n, self.block) + n

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        rows = split(x, self.block)
        scales = np.minimum(covering(np.abs(rows).max(1, initial=0) / _MOST), limit(_MOST))
        units = ratios(rows, scales, _MOST)
        steps = round_by_dice(units, draw) if self.unbiased else np.rint(units)
        write_scales(code, scales).view(np.int8)[...] = steps.reshape(-1)[: len(x)]

    def decode(self, code: Bytes, x: Array) -> None:
        scales, rest = read_scales(code, number(len(x), self.block))
        steps = split(rest.view(np.int8), self.block)
        join(steps * scales.astype(x.dtype)[:, None], x)
