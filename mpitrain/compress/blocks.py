"""Sparse sums with one pattern on all ranks, so that values travel without indices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress.blockwise import number, single
from mpitrain.compress.codec import Sketch, type_of
from mpitrain.compress.options import Named, expect_block, expect_share, kept_of
from mpitrain.compress.topk import largest


@dataclass(frozen=True)
class Blocks(Named):
    """The blocks whose sizes, summed over the ranks, are largest (coarse: Sun et al. 2019).

    Two all-reduces: of each block's sum of sizes, from which all ranks choose alike; then of the
    chosen blocks.  Bytes: 4 a block and 4 block a chosen one.  Biased: with feedback.

    Attributes:
        keep: share of the blocks of all tensors together that is sent; at least one is.
        block: elements of a block, which lies in one tensor.
    """

    name: ClassVar[str] = "blocks"
    unbiased: ClassVar[bool] = False
    keep: float = 0.01
    block: int = 512

    def __post_init__(self) -> None:
        expect_share("keep", self.keep)
        expect_block(self.block)

    def nbytes(self, shapes: Sequence[tuple[int, ...]], itemsize: int = 4) -> int:
        sizes = list(map(prod, shapes))
        width = self.width(sizes)
        blocks = sum(number(size, width) for size in sizes)
        return itemsize * (blocks + kept_of(blocks, self.keep) * width)

    def width(self, sizes: Sequence[int]) -> int:
        """Elements of a block, none of which is longer than the longest tensor."""
        return min(self.block, max([1, *sizes]))

    def sketch(self, tensors: Mapping[str, Array], seed: int) -> "_BlockSketch":
        return _BlockSketch(self, tensors)


class _BlockSketch(Sketch):
    def __init__(self, codec: Blocks, tensors: Mapping[str, Array]) -> None:
        sizes = [tensor.size for tensor in tensors.values()]
        self._tensors, self._block = tensors, codec.width(sizes)
        kind = type_of(tensors)
        blocks = sum(number(size, self._block) for size in sizes)
        count = kept_of(blocks, codec.keep)
        self._rows = np.zeros((blocks, self._block), kind)
        self._scores = np.empty(blocks, kind)
        self._values = np.empty(count * self._block, kind)
        self._own = np.empty((count, self._block), kind)
        self._chosen = np.empty(count, np.uint32)
        self.sums = [self._scores, self._values]

    def phases(self, step: int) -> Iterator[None]:
        for name, rows in self._parts().items():
            rows[...] = self._tensors[name].reshape(-1)
        self._scores[...] = single(np.abs(self._rows).sum(1, dtype=np.float64))
        yield
        self._chosen = largest(self._scores, len(self._chosen))
        self._own[...] = self._rows[self._chosen]
        self._values[...] = self._own.reshape(-1)
        yield
        self._write(self._values.reshape(self._own.shape), self._tensors)

    def sent(self, tensors: Mapping[str, Array]) -> None:
        self._write(self._own, tensors)

    def _write(self, values: Array, tensors: Mapping[str, Array]) -> None:
        self._rows[...] = 0
        self._rows[self._chosen] = values
        for name, rows in self._parts().items():
            tensors[name][...] = rows.reshape(tensors[name].shape)

    def _parts(self) -> dict[str, Array]:
        """The elements of each tensor among the blocks, flat."""
        found, at = {}, 0
        for name, tensor in self._tensors.items():
            blocks = number(tensor.size, self._block)
            found[name] = self._rows[at : at + blocks].reshape(-1)[: tensor.size]
            at += blocks
        return found
