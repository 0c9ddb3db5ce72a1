"""Casts: each number in fewer bits, the sum wide.

The bytes of an all-reduce in 16 bits, without its rounding at each of the p - 1 hops of a ring.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from collectives.codec import Bytes, Draw
from mpitrain.arrays import Array
from mpitrain.compress.blockwise import (
    join,
    limit,
    number,
    ratios,
    read_scales,
    single,
    split,
    write_scales,
)
from mpitrain.compress.options import Named, expect_block


@dataclass(frozen=True)
class BF16(Named):
    """bfloat16: 2 bytes a number, 8 bits of mantissa, the range of float32.

    Rounds to nearest, at most 2**-9 of a number; the largest numbers saturate.  Biased, yet so
    little that it needs no feedback: the code to begin with.
    """

    name: ClassVar[str] = "bf16"
    unbiased: ClassVar[bool] = False
    feedback: ClassVar[str] = "off"

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        most = 2.0**127 * (2 - 2**-7)
        bits = np.clip(x, -most, most).astype(np.float32).view(np.uint32)
        half = np.uint32(0x7FFF) + (bits >> 16 & 1)  # half of the last bit, ties to even
        code.view(np.uint16)[...] = (bits + half) >> 16

    def decode(self, code: Bytes, x: Array) -> None:
        x[...] = (code.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class FP16(Named):
    """IEEE float16: 2 bytes a number, 11 bits of mantissa; above 65504 it saturates.

    Below 6e-5 precision is lost, below 6e-8 all is: gradients are small, so mind the loss scale.
    """

    name: ClassVar[str] = "fp16"
    unbiased: ClassVar[bool] = False
    feedback: ClassVar[str] = "off"

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        code.view(np.float16)[...] = np.clip(x, -65504, 65504)

    def decode(self, code: Bytes, x: Array) -> None:
        x[...] = code.view(np.float16)


@dataclass(frozen=True)
class FP8(Named):
    """Floating point of 8 bits with a scale a block (Micikevicius et al. 2022).

    A block's largest number becomes the format's largest; all are rounded to nearest, ties to
    even.  Bytes: n + 4 a block.  Error of a number: at most 2**-4 (e4m3) or 2**-3 (e5m2) of it, or
    half a step of the smallest numbers.  Biased.

    Attributes:
        form: "e4m3", 3 bits of mantissa, numbers down to 2**-18 of the largest; or "e5m2", 2 bits,
            down to 2**-32.
        block: elements with one scale; 0 for all.
    """

    name: ClassVar[str] = "fp8"
    unbiased: ClassVar[bool] = False
    form: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        expect_block(self.block, may_be_all=True)

    @property
    def _mantissa(self) -> int:
        return 3 if self.form == "e4m3" else 2

    @property
    def _lowest(self) -> int:
        """Exponent of the smallest normal number."""
        return -6 if self.form == "e4m3" else -14

    @property
    def _most(self) -> float:
        return 448.0 if self.form == "e4m3" else 57344.0

    def nbytes(self, n: int) -> int:
        return 4 * number(n, self.block) + n

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        rows = split(x, self.block)
        scales = single(np.abs(rows).max(1, initial=0) / self._most)
        scales = np.minimum(scales, limit(self._most))
        size = np.abs(ratios(rows, scales, self._most))
        exponents = np.frexp(size)[1] - 1
        np.clip(exponents, self._lowest, None, out=exponents)
        exponents[size == 0] = self._lowest
        # A mantissa that rounds up to the next power of two carries into the exponent.
        steps = np.rint(np.ldexp(size, self._mantissa - exponents)).astype(np.int32)
        steps += (exponents - self._lowest) << self._mantissa
        steps |= np.signbit(rows).astype(np.int32) << 7
        join(steps, write_scales(code, scales))

    def decode(self, code: Bytes, x: Array) -> None:
        scales, bits = read_scales(code, number(len(x), self.block))
        rows = split(self._numbers()[bits], self.block)
        join(rows * scales.astype(np.float64)[:, None], x)

    def _numbers(self) -> Array:
        """All 256, float64."""
        bits = np.arange(256)
        fields, steps = np.divmod(bits & 127, 1 << self._mantissa)
        steps += (fields > 0) << self._mantissa
        exponents = np.maximum(fields - 1, 0) + self._lowest - self._mantissa
        return np.where(bits < 128, 1.0, -1.0) * np.ldexp(steps.astype(np.float64), exponents)
