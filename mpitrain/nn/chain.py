"""Layers made of layers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Gradients, Parameters, Shape
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.layer import Layer, Verdict, go_forward


class Chain(Layer):
    """Named layers one after the other; parameter ``weight`` of layer ``up`` is ``up.weight``."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self.layers = dict(layers)
        for attribute in Layer.__annotations__:
            found = self._named(attrgetter(attribute))
            is_set = isinstance(getattr(Layer, attribute), frozenset)
            setattr(self, attribute, frozenset(found) if is_set else found)
        for attribute in ("sees", "holds", "adds_losses", "mixes", "repeats"):
            of = attrgetter(attribute)
            setattr(self, attribute, of(type(self)) or any(map(of, self.layers.values())))
        deciding = (one.choices for one in self.layers.values() if one.choices or one.shapes())
        self.choices = next(deciding, 0)  # of the first layer that does more than to hand on

    def _named(self, of: Callable[[Layer], Any]) -> dict[str, Any]:
        """Results of ``of`` for all layers, under the parameters' names in the chain."""
        found: dict[str, Any] = {}
        for name, layer in self.layers.items():
            own = of(layer)
            values = own if isinstance(own, Mapping) else dict.fromkeys(own)
            found |= {full_name(name, key): value for key, value in values.items()}
        return found

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        return self._named(lambda layer: layer.parameters(rng, xp, dtype))

    def shapes(self) -> dict[str, Shape]:
        return self._named(lambda layer: layer.shapes())

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        return self._named(lambda layer: layer.state(dtype))

    def brought(self) -> dict[str, Array]:
        return self._named(lambda layer: layer.brought())

    def constants(self) -> dict[str, Any]:
        return self._named(lambda layer: layer.constants())

    def verdicts(self) -> list[Verdict]:
        return [found for layer in self.layers.values() for found in layer.verdicts()]

    def output_shape(self, shape: Shape) -> Shape:
        for layer in self.layers.values():
            shape = layer.output_shape(shape)
        return shape

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        saved = []
        for name, layer in self.layers.items():
            x, memory = go_forward(layer, name, own_parameters(parameters, name), x, context)
            saved.append(memory)
        return x, saved

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        kept: list[Any] = []
        for (name, layer), memory in zip(reversed(self.layers.items()), reversed(saved)):
            dy, rest = layer.backward(own_parameters(parameters, name), memory, dy)
            kept.append(rest)
        return dy, kept[::-1]

    def kept(self, parameters: Parameters, saved: Any, dy: Array) -> Any:
        own = [own_parameters(parameters, name) for name in self.layers]
        kept, first = [None] * len(own), next(n for n, given in enumerate(own) if given)
        for n, layer in reversed([*enumerate(self.layers.values())][first:]):
            if n > first:
                dy, kept[n] = layer.backward(own[n], saved[n], dy)
            else:
                kept[n] = layer.kept(own[n], saved[n], dy)
        return kept

    def gradients(self, parameters: Parameters, kept: list[Any]) -> Gradients:
        return {
            full_name(name, own): gradient
            for (name, layer), rest in zip(self.layers.items(), kept, strict=True)
            if rest is not None
            for own, gradient in layer.gradients(own_parameters(parameters, name), rest).items()
        }


class Wrapper(Chain):
    """A layer around another one, with the same parameters and attributes."""

    def __init__(self, layer: Layer) -> None:
        super().__init__({"": layer})
        self.layer = layer

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        return go_forward(self.layer, "", parameters, x, context)

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        return self.layer.backward(parameters, saved, dy)

    def kept(self, parameters: Parameters, saved: Any, dy: Array) -> Any:
        return self.layer.kept(parameters, saved, dy)

    def gradients(self, parameters: Parameters, kept: Any) -> Gradients:
        return self.layer.gradients(parameters, kept)


class Residual(Chain):
    """``y = shortcut(x) + body(x)`` (He et al. 2016); without a shortcut, ``x + body(x)``."""

    def __init__(self, body: Mapping[str, Layer], shortcut: Mapping[str, Layer] | None = None):
        super().__init__(
            {"body": Chain(body)} | ({"shortcut": Chain(shortcut)} if shortcut else {})
        )

    def output_shape(self, shape: Shape) -> Shape:
        shapes = {name: branch.output_shape(shape) for name, branch in self.layers.items()}
        straight = shapes.get("shortcut", shape)
        if shapes["body"] != straight:
            raise ValueError(
                f"a residual cannot add {shapes['body']} to {straight}; it needs a shortcut"
            )
        return straight

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, list[Any]]:
        y, saved = x, []
        for name, branch in reversed(self.layers.items()):
            out, memory = go_forward(branch, name, own_parameters(parameters, name), x, context)
            y = out if name == "shortcut" else y + out
            saved.append(memory)
        return y, saved[::-1]

    def backward(
        self, parameters: Parameters, saved: list[Any], dy: Array
    ) -> tuple[Array, list[Any]]:
        dx, kept = dy, []
        for (name, branch), memory in zip(reversed(self.layers.items()), reversed(saved)):
            along, rest = branch.backward(own_parameters(parameters, name), memory, dy)
            dx = along if name == "shortcut" else dx + along
            kept.append(rest)
        return dx, kept[::-1]


class Recomputed(Wrapper):
    """A layer that saves only its input, and goes forward again before it goes backward.

    It keeps one input in memory instead of all activations, for a third more computation (Chen et
    al. 2016).
    """

    repeats = True

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        return super().forward(parameters, x, context)[0], (x, context)

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, context = saved
        _, activations = super().forward(parameters, x, replace(context, again=True))
        return super().backward(parameters, activations, dy)


def full_name(layer: str, own: str) -> str:
    """Name in a chain of what ``layer`` names ``own``; a wrapped layer has no name."""
    return f"{layer}.{own}" if layer else own


def own_parameters(parameters: Parameters, name: str) -> Parameters:
    """The parameters of the layer of this name in a chain, by their names in it."""
    prefix = full_name(name, "")
    return {
        key.removeprefix(prefix): value
        for key, value in parameters.items()
        if key.startswith(prefix)
    }
