"""A model: named layers in a row, their initial values, and the loss."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Shape
from mpitrain.config import ConfigError
from mpitrain.group import TensorGroup
from mpitrain.nn import Chain, Layer
from mpitrain.objective import LossFunction


class SequentialModel(Chain):
    """A chain that a pipeline cuts between its layers, and the loss of its outputs.

    ``group``: ranks that share the columns of the last one's outputs, of which is the loss.
    """

    def __init__(self, layers: Mapping[str, Layer], loss: LossFunction, group: TensorGroup) -> None:
        super().__init__(layers)
        self.loss = loss
        self.group = group

    def drawn(self, name: str, seed: int, xp: ModuleType, dtype: DTypeLike) -> dict[str, Array]:
        """Initial values of a layer, whole.

        They depend only on the seed and the layer's position, so each stage makes its own.
        """
        layer = self.layers[name]
        # Two words of spawn key: the sampler's streams have one.
        position = list(self.layers).index(name)
        stream = np.random.SeedSequence(seed, spawn_key=(0, position))
        values = layer.parameters(np.random.default_rng(stream), xp, dtype)
        for own, full in layer.tied.items():
            owner = self._owner(name, full)
            values[own] = self.drawn(owner, seed, xp, dtype)[full.removeprefix(f"{owner}.")]
        return values

    def trained(self) -> dict[str, Shape]:
        """Shapes of all parameters by name; a tied one is its owner's."""
        return {name: shape for name, shape in self.shapes().items() if name not in self.tied}

    @property
    def size(self) -> int:
        """Numbers that are trained; a tied tensor counts once."""
        return sum(map(prod, self.trained().values()))

    def output_shape(self, shape: Shape) -> Shape:
        """Shape of the model's output for a sample of ``shape``.

        Raises:
            ValueError: a layer cannot take the output of the layer before it.
        """
        for name, layer in self.layers.items():
            try:
                shape = layer.output_shape(shape)
            except ValueError as error:
                raise ValueError(f"layer {name}: {error}") from error
        return shape

    def trained_in(self, names: Iterable[str]) -> Iterator[tuple[str, str, Shape]]:
        """Layer, name and shape of each tensor of some layers; what several have comes once."""
        tied = {name: self.layers[name].tied for name in names}
        for name in tied:
            for own, shape in self.layers[name].shapes().items():
                if own not in tied[name] or self._owner(name, tied[name][own]) not in tied:
                    yield name, own, shape

    def ties(self) -> dict[str, frozenset[str]]:
        """Names of the layers that share a tensor, for each tensor that several layers have.

        Raises:
            ConfigError: a layer is tied to one that does not exist.
        """
        users: dict[str, set[str]] = {}
        for name, layer in self.layers.items():
            for full in layer.tied.values():
                users.setdefault(full, {self._owner(name, full)}).add(name)
        return {full: frozenset(names) for full, names in users.items()}

    def _owner(self, user: str, full: str) -> str:
        """Name of the layer that owns the tensor ``full``, to which one of ``user``'s is tied.

        ``enc.x.weight`` belongs to ``enc.x``, even if there is a layer ``enc``.
        """
        owners = [name for name in self.layers if full.startswith(f"{name}.")]
        if not owners:
            raise ConfigError(
                f"model: layer {user} has {full!r} in common with a layer that is not there; the "
                f"layers are {', '.join(self.layers)}"
            )
        return max(owners, key=len)
