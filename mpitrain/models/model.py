"""A model: named layers in a row, their initial values, and the loss."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Shape
from mpitrain.config import ConfigError
from mpitrain.group import TensorGroup
from mpitrain.nn import Layer
from mpitrain.objective import LossFunction


class SequentialModel:
    """Layers by name, one after the other; a pipeline is cut between them.

    ``group``: ranks that share the columns of the last one's outputs, of which is the loss.
    """

    def __init__(self, layers: Mapping[str, Layer], loss: LossFunction, group: TensorGroup) -> None:
        self.layers = dict(layers)
        self.loss = loss
        self.group = group

    def initial(
        self, names: Sequence[str], seed: int, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, dict[str, Array]]:
        """Initial values of some layers, whole.

        They depend only on the seed and the layer's position, so each stage makes its own.
        """
        return {name: self._initial(name, seed, xp, dtype) for name in names}

    def shapes(self, names: Sequence[str]) -> dict[str, dict[str, Shape]]:
        """Shapes of some layers' parameters, whole; nothing is drawn."""
        return {name: self.layers[name].shapes() for name in names}

    def names(self) -> list[str]:
        """Names of all parameters; a tied one has its owner's name."""
        return [
            f"{name}.{own}"
            for name, layer in self.layers.items()
            for own in layer.shapes()
            if own not in layer.tied
        ]

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

    @property
    def adds_losses(self) -> bool:
        """Whether a layer adds terms to the loss of a training step."""
        return any(layer.adds_losses for layer in self.layers.values())

    @property
    def size(self) -> int:
        """Numbers that are trained; a tied tensor counts once."""
        return self.size_of(self.layers)

    def size_of(self, names: Iterable[str]) -> int:
        """Numbers that are trained in some layers; one that several of them have counts once."""
        tied = {name: self.layers[name].tied for name in names}
        return sum(
            prod(shape)
            for name in names
            for own, shape in self.layers[name].shapes().items()
            if own not in tied[name] or self._owner(name, tied[name][own]) not in tied
        )

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

    def _initial(self, name: str, seed: int, xp: ModuleType, dtype: DTypeLike) -> dict[str, Array]:
        layer = self.layers[name]
        # Two words of spawn key: the sampler's streams have one.
        position = list(self.layers).index(name)
        stream = np.random.SeedSequence(seed, spawn_key=(0, position))
        values = layer.parameters(np.random.default_rng(stream), xp, dtype)
        for own, full in layer.tied.items():
            owner = self._owner(name, full)
            values[own] = self._initial(owner, seed, xp, dtype)[full.removeprefix(f"{owner}.")]
        return values
