"""Sparse sums with one pattern on all ranks, so that values travel without indices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress.codec import Sketch, type_of
from mpitrain.compress.options import Named, expect_share, kept_of
from mpitrain.compress.seeds import subset


@dataclass(frozen=True)
class RandomK(Named):
    """Random elements, drawn alike by all ranks from the seed, the step and the tensor's name.

    Bytes: 4 a value and no indices (Konecny et al. 2016; Stich et al. 2018).  Biased, with
    feedback; or each value times n/k, unbiased with a variance of n/k - 1 times the square, and
    without.

    Attributes:
        keep: share of each tensor's elements that is sent; at least one is.
        scaled: values times n/k.
    """

    name: ClassVar[str] = "randomk"
    keep: float = 0.01
    scaled: bool = False

    def __post_init__(self) -> None:
        expect_share("keep", self.keep)

    @property
    def unbiased(self) -> bool:
        return self.scaled

    @property
    def feedback(self) -> str:
        return "never" if self.scaled else "on"

    def nbytes(self, shapes: Sequence[tuple[int, ...]], itemsize: int = 4) -> int:
        return itemsize * sum(kept_of(prod(shape), self.keep) for shape in shapes)

    def sketch(self, tensors: Mapping[str, Array], seed: int) -> "_RandomSketch":
        return _RandomSketch(self, tensors, seed)


class _RandomSketch(Sketch):
    def __init__(self, codec: RandomK, tensors: Mapping[str, Array], seed: int) -> None:
        self._codec, self._tensors, self._seed = codec, tensors, seed
        kind = type_of(tensors)
        self._counts = {name: kept_of(t.size, codec.keep) for name, t in tensors.items()}
        self._values = np.empty(sum(self._counts.values()), kind)
        self._own = np.empty_like(self._values)
        self._chosen: dict[str, Array] = {}
        self.sums = [self._values]

    def phases(self, step: int) -> Iterator[None]:
        at = 0
        for name, tensor in self._tensors.items():
            count = self._counts[name]
            self._chosen[name] = subset(tensor.size, count, self._seed, step, "randomk", name)
            factor = tensor.size / count if self._codec.scaled and count else 1
            self._own[at : at + count] = tensor.reshape(-1)[self._chosen[name]] * factor
            at += count
        self._values[...] = self._own
        yield
        self._write(self._values, self._tensors)

    def sent(self, tensors: Mapping[str, Array]) -> None:
        self._write(self._own, tensors)

    def _write(self, values: Array, tensors: Mapping[str, Array]) -> None:
        at = 0
        for name, tensor in tensors.items():
            flat, count = np.zeros(tensor.size, tensor.dtype), self._counts[name]
            flat[self._chosen[name]] = values[at : at + count]
            tensor[...] = flat.reshape(tensor.shape)
            at += count
