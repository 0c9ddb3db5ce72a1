"""Casts: each number in fewer bits, the sum wide.

The bytes of an all-reduce in 16 bits, without its rounding at each of the p - 1 hops of a ring.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from collectives.coded import Bytes, Draw
from mpitrain.arrays import Array


@dataclass(frozen=True)
class _Cast:
    """A code of ``kind``; what is larger than its largest number becomes that."""

    unbiased: ClassVar[bool] = False
    kind: ClassVar[Any]

    def __str__(self) -> str:
        return type(self).__name__.lower()

    def nbytes(self, n: int) -> int:
        return n * np.dtype(self.kind).itemsize

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        most = float(ml_dtypes.finfo(self.kind).max)
        code.view(self.kind)[...] = np.clip(x, -most, most)

    def decode(self, code: Bytes, x: Array) -> None:
        x[...] = code.view(self.kind)


class BF16(_Cast):
    """bfloat16: 2 bytes, 8 bits of mantissa, the range of float32."""

    kind = ml_dtypes.bfloat16


class FP16(_Cast):
    """IEEE float16: 2 bytes, 11 bits of mantissa; above 65504 it saturates."""

    kind = np.float16
