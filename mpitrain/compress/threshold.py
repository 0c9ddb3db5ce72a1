"""A threshold, which is also the value that is sent."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from collectives.codec import Bytes, Draw
from mpitrain.arrays import Array
from mpitrain.compress.options import Named
from mpitrain.compress.packing import pack, packed, unpack


@dataclass(frozen=True)
class Threshold(Named):
    """-tau, 0 or tau: sizes of tau or more are sent as tau (2 bits, MXNet 2017).

    Bytes: n/4.  Biased: with feedback, which loses nothing; in a two-phase exchange the owner
    of a sum needs feedback too, as it sends one tau of several.  Too large a tau sends nothing for
    a long time, too small a one lags behind: watch the residual.  With tau a power of two, sent
    and residual parts of dyadic numbers add up exactly.

    Attributes:
        tau: in units of gradients, chosen in advance.
    """

    name: ClassVar[str] = "threshold"
    unbiased: ClassVar[bool] = False
    tau: float = 2.0**-10

    def __post_init__(self) -> None:
        limits = np.finfo(np.float32)
        if not limits.tiny <= self.tau <= limits.max:
            raise ValueError(f"tau is {self.tau}; it must be above 0, a number of float32")

    def nbytes(self, n: int) -> int:
        return packed(n, 2)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        tau = np.float32(self.tau)
        pack((x >= tau) + 2 * (x <= -tau).astype(np.uint8), 2, code)

    def decode(self, code: Bytes, x: Array) -> None:
        bits = unpack(code, len(x), 2).astype(np.int8)
        x[...] = np.float32(self.tau) * ((bits & 1) - (bits >> 1))
