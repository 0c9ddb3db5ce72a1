"""The context of a forward pass, for layers that need more than parameters and input."""

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
        training: whether this is a training step rather than a test.
        seed: the job's seed.
        step: steps done before this one.
        samples: numbers of the micro-batch's samples in the data set.
        replicas: ranks that go forward together with this one, on other samples of the batch.
        state: arrays of the layer that are no parameters, by name; the layer may change them.
        path: names of the layers around the layer, and its own.
        again: whether this forward pass repeats an earlier one, before the backward pass.
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
        """The context of the layer of this name within the present one."""
        prefix = f"{name}."
        own = {k.removeprefix(prefix): v for k, v in self.state.items() if k.startswith(prefix)}
        return replace(self, state=own, path=(*self.path, name))

    def uniform(self, shape: tuple[int, ...]) -> Array:
        """Pseudo-random integers of 64 bits, of the shape (samples, *shape).

        A number depends only on the seed, the step, the layer, the sample and its place in the
        sample; any layout of ranks gives the same: SplitMix64 (Steele et al. 2014) by counter.
        """
        rows = np.zeros(len(self.samples), np.uint64)
        for key in (self.seed, self.step, crc32(".".join(self.path).encode()), self.samples):
            rows = _mixed(rows + np.asarray(key).astype(np.uint64))
        counters = np.arange(prod(shape), dtype=np.uint64)
        found: Array = _mixed(rows[:, None] + counters).reshape(-1, *shape)
        return found


#: Context outside of training, as when shapes are tried.
RESTING = Context()


@np.errstate(over="ignore")
def _mixed(values: Array) -> Array:
    """SplitMix64's output for these states."""
    z: Array = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
