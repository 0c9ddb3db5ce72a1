"""What a layer sees besides its parameters and its input, if it asks for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self
from zlib import crc32

import numpy as np

from mpitrain.arrays import Array
from mpitrain.group import TensorGroup


@dataclass(frozen=True)
class Context:
    """Where in training a layer goes forward.

    Attributes:
        training: whether it is a step, and not a test.
        seed: of the job.
        step: that were done before this one.
        samples: numbers of the samples of the micro-batch, in the data set.
        replicas: the ranks that have the other parts of the same samples' batch, and go forward
            together with this one.
        state: arrays of the layer that are no parameters, by name; it may change them.
        path: the layer's name, a part for each layer around it.
        again: it has gone forward here before, and does so once more to go backward.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    samples: Array = field(default_factory=lambda: np.arange(0))
    replicas: TensorGroup = field(default_factory=TensorGroup)
    state: Mapping[str, Array] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    again: bool = False

    def inside(self, name: str) -> Self:
        """As the layer of this name within the present one sees it."""
        prefix = f"{name}."
        own = {k.removeprefix(prefix): v for k, v in self.state.items() if k.startswith(prefix)}
        return replace(self, state=own, path=(*self.path, name))

    def uniform(self, shape: tuple[int, ...]) -> Array:
        """Whole numbers of 64 bits that look random, of the shape (samples, *shape).

        Each follows from the seed, the step, the layer, the sample and its place in it alone, and
        so is the same on any layout of ranks: SplitMix64 (Steele et al. 2014) by counter.
        """
        rows = np.zeros(len(self.samples), np.uint64)
        for key in (self.seed, self.step, crc32(".".join(self.path).encode()), self.samples):
            rows = _mixed(rows + np.asarray(key).astype(np.uint64))
        counters = np.arange(prod(shape), dtype=np.uint64)
        found: Array = _mixed(rows[:, None] + counters).reshape(-1, *shape)
        return found


#: Not in training, as when shapes are tried.
RESTING = Context()


@np.errstate(over="ignore")
def _mixed(values: Array) -> Array:
    """SplitMix64's output for these states."""
    z: Array = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
