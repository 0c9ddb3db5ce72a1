"""Rotations: the energy of a vector spread evenly over its elements, and codecs after that.

A rotation has orthonormal rows, so that lengths stay and sums of rotated vectors are the rotated
sum: it may be undone after the sum.  No element of the rotated vector is much larger than the
others, whatever the vector was, so that a quantiser with one scale loses the least
(Konecny et al. 2016; Suresh et al. 2017).
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from collectives.codec import Bytes, Codec, Draw
from mpitrain.arrays import Array
from mpitrain.compress.codec import Feedback, feedback_of
from mpitrain.compress.integers import Int8
from mpitrain.compress.options import Named, expect_share, kept_of
from mpitrain.compress.seeds import generator, subset

#: Bound of the numbers, so that no sum overflows.
_MOST = 1e290
#: Numbers that stay in a processor's cache between two passes.
_CACHED = 1 << 15


def padded(n: int, block: int = 0) -> int:
    """Elements of a rotated vector of ``n``: the next power of two, or whole blocks of one."""
    power = 1 << (n - 1).bit_length() if n else 0
    return power if not block or power <= block else -(-n // block) * block


def random_signs(n: int, *words: int | str) -> Array:
    """n of -1 and 1, drawn by these words; float64."""
    bits = np.frombuffer(generator(*words, "signs").bytes(-(-n // 8)), np.uint8)
    return 1.0 - 2.0 * np.unpackbits(bits, count=n)


def rotate(x: Array, signs: Array, block: int = 0) -> Array:
    """H D x: signs, then the orthonormal Walsh-Hadamard transform.

    Linear: vectors rotated by the same signs may be summed, and the sum be rotated back.
    Cost: n log2(block or n) additions.

    Args:
        x: shape (n,).
        signs: D, -1 or 1, shape (padded(n, block),), as is the result; float64.
        block: elements that are rotated together, a power of two; 0 for all.
    """
    z = np.zeros(len(signs))
    z[: len(x)] = x
    np.clip(z, -_MOST, _MOST, out=z)
    z *= signs
    return _hadamard(z, block)


def unrotate(z: Array, n: int, signs: Array, block: int = 0) -> Array:
    """The vector of shape (n,) that :func:`rotate` made ``z`` of; float64, ``z`` is not changed.

    It is also the transpose: for any ``z``, the vector whose rotation is nearest to it.
    """
    x = _hadamard(np.clip(np.array(z, np.float64), -_MOST, _MOST), block)
    x *= signs
    return x[:n]


def _hadamard(x: Array, block: int) -> Array:
    """The transform of each block of ``x``, which is overwritten.

    It is that of the rows and then of the columns of a matrix, so that all loops are long.  Sums
    are of two, in a fixed order: the same bits on all processors.
    """
    if not len(x):
        return x
    length = min(len(x), block or len(x))
    columns = 1 << (length.bit_length() - 1) // 2
    x /= np.sqrt(length)
    matrices = x.reshape(-1, length // columns, columns)
    together = max(1, _CACHED // length)
    for start in range(0, len(matrices), together):
        some = _butterflies(matrices[start : start + together])
        across = _butterflies(np.ascontiguousarray(some.transpose(0, 2, 1)))
        some[...] = across.transpose(0, 2, 1)
    return x


def _butterflies(x: Array) -> Array:
    """The transform of axis 1 of three, in place."""
    many, rows, columns = x.shape
    half = 1
    while half < rows:
        pairs = x.reshape(many, rows // (2 * half), 2, half * columns)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        difference = first - second
        first += second
        second[...] = difference
        half *= 2
    return x


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
