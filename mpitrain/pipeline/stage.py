"""Computations of a pipeline stage, and the sources of its samples and weights."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from mpitrain.arrays import Array, Gradients, Scalar
from mpitrain.nn import Layer
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.layer import go_forward
from mpitrain.parallel.store import Weights

#: Takes the gradients of a layer, by its index in the store.
Emit = Callable[[int, Gradients], None]


class Stage:
    """A part of a model that a rank takes micro-batches through: layers one after the other."""

    def __init__(
        self, layers: Sequence[Layer], first: int = 0, names: Sequence[str] | None = None,
        leading: Set[str] = frozenset(),
    ) -> None:  # fmt: skip
        """``first``: index of the first layer in the store; ``names``: names in the model;
        ``leading``: see :class:`~mpitrain.nn.context.Context`."""
        self.layers = tuple(enumerate(layers, first))
        self._first, self._stop = first, first + len(layers)
        self.names = list(names or map(str, range(first, first + len(layers))))
        self._leading = leading

    def forward(self, weights: Weights, x: Array, context: Context = RESTING) -> tuple[Array, Any]:
        """Return ``(y, saved)`` for a micro-batch."""
        saved = []
        for name, (index, layer) in zip(self.names, self.layers, strict=True):
            own = weights.take(index, range(index + 1, self._stop))
            x, memory = go_forward(layer, name, own, x, context)
            del own  # else it would stay beside the next two layers' parameters
            weights.release(index)
            saved.append(memory)
        return x, saved

    def backward(
        self, weights: Weights, saved: Any, dy: Array, emit: Emit | None
    ) -> tuple[Array, Any]:
        """Return ``(dx, kept)``; with ``emit``, give it all gradients by parameters on the way.

        ``dx`` is undefined where nothing before the stage's first layer is trained.
        """
        kept: list[Any] = []
        every = zip(self.names, self.layers, saved, strict=True)
        for name, (index, layer), memory in reversed([*every]):
            parameters, rest = weights.take(index, self._below(index)), None
            if name not in self._leading:
                dy, rest = layer.backward(parameters, memory, dy)
            elif parameters:
                rest = layer.kept(parameters, memory, dy)
            if emit is None:
                kept.append(rest)
            else:
                emit(index, layer.gradients(parameters, rest) if parameters else {})
            del parameters
            weights.release(index)
        return dy, kept[::-1]

    def gradients(self, weights: Weights, kept: Any, emit: Emit) -> None:
        """Give ``emit`` the gradients by parameters that :meth:`backward` left."""
        for (index, layer), rest in zip(reversed(self.layers), reversed(kept), strict=True):
            parameters = weights.take(index, self._below(index))
            emit(index, layer.gradients(parameters, rest) if parameters else {})
            del parameters
            weights.release(index)

    def _below(self, index: int) -> range:
        """The layers that a backward pass takes after this one."""
        return range(index - 1, self._first - 1, -1)


class Source(Protocol):
    """The micro-batches of a run, by number."""

    def samples(self, micro_batch: int) -> int:
        """Number of samples."""

    def inputs(self, micro_batch: int) -> Array:
        """Inputs of the first stage."""

    def loss(self, micro_batch: int, outputs: Array) -> tuple[Scalar, Array]:
        """The loss of the last stage's outputs, and its gradient by them."""


class WeightsInTime(Protocol):
    """Weights of each micro-batch, in schedules that update as they go."""

    def forward(self, micro_batch: int) -> Weights: ...
    def backward(self, micro_batch: int) -> Weights: ...
    def done(self, micro_batch: int) -> None: ...


@dataclass(frozen=True)
class Latest:
    """The latest weights for all micro-batches, as in synchronous training."""

    weights: Weights

    def forward(self, micro_batch: int) -> Weights:
        return self.weights

    def backward(self, micro_batch: int) -> Weights:
        return self.weights

    def done(self, micro_batch: int) -> None:
        """Its backward pass is over."""
