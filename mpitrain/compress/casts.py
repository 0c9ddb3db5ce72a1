"""Casts: each number in fewer bits, summed in full width.

The bytes of an all-reduce in 16 bits, without its rounding at each of the p - 1 hops of a ring.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from collectives.codec import Bytes, Draw
from mpitrain.arrays import Array
from mpitrain.compress.options import Named


class _Cast(Named):
    """Biased, yet so little that it needs no feedback."""

    unbiased: ClassVar[bool] = False
    feedback: ClassVar[str] = "off"

    def nbytes(self, n: int) -> int:
        return 2 * n


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16: 2 bytes a number, 8 bits of mantissa, the range of float32.

    Rounds to nearest, at most 2**-8 of a number; the largest numbers saturate.  Try it first.
    """

    name: ClassVar[str] = "bf16"

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        most = 2.0**127 * (2 - 2**-7)
        bits = np.clip(x, -most, most).astype(np.float32).view(np.uint32)
        half = np.uint32(0x7FFF) + (bits >> 16 & 1)  # half of the last bit, ties to even
        code.view(np.uint16)[...] = (bits + half) >> 16

    def decode(self, code: Bytes, x: Array) -> None:
        x[...] = (code.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class FP16(_Cast):
    """IEEE float16: 2 bytes a number, 11 bits of mantissa; above 65504 it saturates.

    Rounds to nearest, at most 2**-11 of a number.  Numbers below 6e-5 lose precision, those below
    6e-8 become 0: gradients are small, so mind the loss scale.
    """

    name: ClassVar[str] = "fp16"

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        code.view(np.float16)[...] = np.clip(x, -65504, 65504)

    def decode(self, code: Bytes, x: Array) -> None:
        x[...] = code.view(np.float16)
