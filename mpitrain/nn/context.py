"""The context of a forward pass, for layers that need more than parameters and input."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Self
from zlib import crc32

import numpy as np

from mpitrain.arrays import Array, Scalar
from mpitrain.group import TensorGroup

if TYPE_CHECKING:
    from mpitrain.nn.positions import Positions


@dataclass
class Terms:
    """Terms of a micro-batch's loss that layers add to what the last one's outputs give.

    Attributes:
        share: factor of a sample in the loss, which is a mean over the batch.
        scale: factor on gradients, for a narrow type.
        total: sum of the terms so far; None: no layer has added any.
    """

    share: float
    scale: float = 1.0
    total: Scalar | None = None

    def add(self, value: Scalar) -> None:
        """Add the sum of a term over the micro-batch's samples."""
        term = self.share * value
        self.total = term if self.total is None else self.total + term


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
        positions: the cut of a sample's positions among ranks; None: this rank has them all.
        keyed: whether random numbers are the same in every layout; otherwise, a layer whose code is
            not ours may draw its own, seeded by the step and the micro-batch.
        terms: terms of the loss that layers add; None: nothing is trained.
        leading: names of the layers by whose inputs nobody takes a gradient, as nothing before them
            is trained.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    samples: Array = field(default_factory=lambda: np.arange(0))
    replicas: TensorGroup = field(default_factory=TensorGroup)
    state: Mapping[str, Array] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    again: bool = False
    keyed: bool = True
    positions: "Positions | None" = None
    terms: Terms | None = None
    leading: frozenset[str] = frozenset()

    def inside(self, name: str) -> Self:
        """The context of the layer of this name within the present one."""
        prefix, found = f"{name}.", object.__new__(type(self))  # replace() takes ten times as long
        own = {k.removeprefix(prefix): v for k, v in self.state.items() if k.startswith(prefix)}
        vars(found).update(vars(self), state=own, path=(*self.path, name))
        return found

    def seeds(self) -> Array:
        """Pseudo-random integers of 64 bits, of the shape (samples,), for the place and the step.

        SplitMix64 (Steele et al. 2014) by counter.
        """
        state = 0
        for key in (self.seed, self.step, crc32(".".join(self.path).encode())):
            state = _mixed_number(state + key)
        return _mixed(self.samples.astype(np.uint64) + np.uint64(state))

    def uniform(
        self, shape: tuple[int, ...], xp: ModuleType = np,
        first: tuple[int | Array, ...] | None = None,
    ) -> Array:  # fmt: skip
        """Pseudo-random integers of 64 bits, of the shape (samples, *shape), in ``xp``'s memory.

        A number depends only on the seed, the step, the layer, the sample and its place in the
        sample, axis by axis, so that padding behind it changes nothing; any layout of ranks gives
        the same.  ``first`` is the place of the first number, or the places of all along an axis:
        of a part of the sample, which has the numbers that it has in the whole.
        """
        counters = xp.asarray(self.seeds())
        for axis, (start, size) in enumerate(zip(first or (0,) * len(shape), shape, strict=True)):
            factor = np.uint64(_mixed_number(axis) | 1 if axis else 1)
            if isinstance(start, np.ndarray):
                places = xp.asarray(start, np.uint64)
            else:
                places = xp.arange(start, start + size, dtype=np.uint64)
            counters = counters[..., None] + places * factor
        return _mixed(counters)


_ALL = 2**64 - 1
#: Context outside of training, as when shapes are tried.
RESTING = Context()


def _mixed_number(value: int) -> int:
    """SplitMix64's output for one state."""
    z = (value + 1) * 0x9E3779B97F4A7C15 & _ALL
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _ALL
    return z ^ z >> 31


@np.errstate(over="ignore")
def _mixed(values: Array) -> Array:
    """SplitMix64's output for these states."""
    z: Array = values * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z
