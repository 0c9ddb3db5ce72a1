"""Another codec of rotated vectors."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from collectives.codec import Bytes, Codec, Draw
from mpitrain.arrays import Array
from mpitrain.compress.codec import Feedback, feedback_of
from mpitrain.compress.integers import Int8
from mpitrain.compress.options import Named, expect_share, kept_of
from mpitrain.compress.rotate import padded, random_signs, rotate, unrotate
from mpitrain.compress.seeds import generator, subset


@dataclass(frozen=True)
class Rotated(Named):
    """Another codec of the rotated vector, written ``rotate+int8`` (Konecny et al. 2016).

    A seed of 8 bytes travels along, from which whoever decodes has signs and mask.  Bytes: 8, and
    those of the other codec for up to a block more elements.  Biased as the other codec; it loses
    less where few elements are large, and takes log2(block) additions more a number.

    Attributes:
        block: elements that are rotated together, a power of two; 0 for all.
        keep: share of the rotated elements that is sent, chosen at random; with an
            unbiased codec times 1/keep, so that it stays unbiased.
        code: codec of the rotated elements.
    """

    name: ClassVar[str] = "rotate"
    block: int = 1024
    keep: float = 1.0
    code: Codec = field(default_factory=Int8)

    def __post_init__(self) -> None:
        expect_share("keep", self.keep)
        if self.block < 0 or self.block & (self.block - 1):
            raise ValueError(f"block is {self.block}; it must be a power of two, or 0 for all")
        if isinstance(self.code, Rotated) or getattr(self.code, "votes", False):
            raise ValueError(f"{self.code} cannot be rotated; a codec of numbers can, as int8")

    def __str__(self) -> str:
        return f"{super().__str__()}+{self.code}"

    @property
    def unbiased(self) -> bool:
        return self.code.unbiased

    @property
    def feedback(self) -> Feedback:
        return "never" if self.unbiased and self.keep < 1 else feedback_of(self.code)

    def nbytes(self, n: int) -> int:
        return 8 + self.code.nbytes(self._sent(n)) if n else 0

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        if not len(x):
            return
        seed = int(draw().integers(1 << 63))
        code[:8].view(np.uint64)[0] = seed
        signs, chosen = self._signs(len(x), seed), self._chosen(len(x), seed)
        z = rotate(x, signs, self.block)
        if chosen is not None:
            z = z[chosen] * (len(z) / len(chosen) if self.unbiased else 1)
        self.code.encode(z, code[8:], lambda: generator(seed, "dice"))

    def decode(self, code: Bytes, x: Array) -> None:
        n = len(x)
        if not n:
            return
        seed = int(code[:8].view(np.uint64)[0])
        sent, chosen = np.empty(self._sent(n)), self._chosen(n, seed)
        self.code.decode(code[8:], sent)
        z = sent
        if chosen is not None:
            z = np.zeros(padded(n, self.block))
            z[chosen] = sent
        most = float(np.finfo(x.dtype).max)
        x[...] = np.clip(unrotate(z, n, self._signs(n, seed), self.block), -most, most)

    def _sent(self, n: int) -> int:
        """Number of elements for the other codec."""
        return kept_of(padded(n, self.block), self.keep) if self.keep < 1 else padded(n, self.block)

    def _signs(self, n: int, seed: int) -> Array:
        return random_signs(padded(n, self.block), seed)

    def _chosen(self, n: int, seed: int) -> Array | None:
        """Indices of the elements that are sent; None for all."""
        if self.keep == 1:
            return None
        return subset(padded(n, self.block), self._sent(n), seed, "mask")
