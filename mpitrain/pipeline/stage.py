"""Computations of a pipeline stage."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpitrain.arrays import Array, Gradients
from mpitrain.nn import Layer
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.layer import go_forward
from mpitrain.parallel.store import Weights

#: Takes the gradients of a layer, by its index in the store.
Emit = Callable[[int, Gradients], None]


class Stage(Protocol):
    """A part of a model that a rank takes micro-batches through."""

    def forward(self, weights: Weights, x: Array, context: Context = RESTING) -> tuple[Array, Any]:
        """Return ``(y, saved)`` for a micro-batch."""

    def backward(
        self, weights: Weights, saved: Any, dy: Array, emit: Emit | None
    ) -> tuple[Array, Any]:
        """Return ``(dx, kept)``; with ``emit``, give it all gradients by parameters on the way."""

    def gradients(self, weights: Weights, kept: Any, emit: Emit) -> None:
        """Give ``emit`` the gradients by parameters that :meth:`backward` left."""


class LayerStage:
    """Layers one after the other."""

    def __init__(
        self, layers: Sequence[Layer], first: int = 0, names: Sequence[str] | None = None
    ) -> None:
        """``first``: index of the first layer in the store; ``names``: names in the model."""
        self.layers = tuple(enumerate(layers, first))
        self.names = list(names or map(str, range(first, first + len(layers))))

    def forward(
        self, weights: Weights, x: Array, context: Context = RESTING
    ) -> tuple[Array, list[Any]]:
        saved = []
        for name, (index, layer) in zip(self.names, self.layers, strict=True):
            x, memory = go_forward(layer, name, weights.take(index), x, context)
            weights.release(index)
            saved.append(memory)
        return x, saved

    def backward(
        self, weights: Weights, saved: list[Any], dy: Array, emit: Emit | None
    ) -> tuple[Array, list[Any]]:
        kept: list[Any] = []
        for (index, layer), memory in zip(reversed(self.layers), reversed(saved), strict=True):
            parameters = weights.take(index)
            dy, rest = layer.backward(parameters, memory, dy)
            if emit is None:
                kept.append(rest)
            else:
                emit(index, layer.gradients(parameters, rest))
            weights.release(index)
        return dy, kept[::-1]

    def gradients(self, weights: Weights, kept: list[Any], emit: Emit) -> None:
        for (index, layer), rest in zip(reversed(self.layers), reversed(kept), strict=True):
            parameters = weights.take(index)
            emit(index, layer.gradients(parameters, rest))
            weights.release(index)
