"""A chain of layers."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.nn.layer import Array, Layer, Parameters, Shape


class Sequential:
    """Layers applied one after the other; parameters and saved values are lists, one entry each.

    A part of the chain is therefore the same slice of the layers and of the parameters.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> list[dict[str, Array]]:
        """Initial values of each layer in turn."""
        return [layer.parameters(rng, xp, dtype) for layer in self.layers]

    def output_shape(self, shape: Shape) -> Shape:
        """Shape of one output for one input of ``shape``; ``ValueError`` if layers do not fit."""
        for layer in self.layers:
            shape = layer.output_shape(shape)
        return shape

    def forward(self, parameters: Sequence[Parameters], x: Array) -> tuple[Array, list[Any]]:
        """Return the last layer's output and what each layer saved."""
        saved = []
        for layer, own in zip(self.layers, parameters, strict=True):
            x, memory = layer.forward(own, x)
            saved.append(memory)
        return x, saved

    def backward(
        self, parameters: Sequence[Parameters], saved: Sequence[Any], dy: Array
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield ``(layer index, its gradients)`` from the last layer to the first.

        A generator, so that the caller can reduce a layer's gradients over the ranks while the
        layers below are still to be computed.
        """
        for index in reversed(range(len(self.layers))):
            dy, gradients = self.layers[index].backward(parameters[index], saved[index], dy)
            yield index, gradients
