"""A strategy's view of a rank: its worker's weights, and its peers in the other workers."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.models import SequentialModel
from mpitrain.parallel.arena import Arena, Tensor
from mpitrain.parallel.store import Piece
from mpitrain.parallel.summation import Dense, Summation


@dataclass(frozen=True)
class Workers:
    """A rank's part of its worker, and the ranks that have the same part of the others.

    Attributes:
        comm: these ranks, one of each worker, in their order.
        arena: the layout of the flat arrays.
        layer_of: number of the layer that has a tensor first, by its name, in the whole model.
        layers: how many layers the model has.
        parameters, gradients: the worker's, shape (arena.size,).
        pieces: the same memory as it is updated.
        state: the optimiser's, for each piece.
        counted: elements of the arena for which this rank answers in its worker.
        summation: makes what sums the ways of the workers.
        dense: sums what must be exact.
        agrees_late: workers tell each other of their steps after several of them.
        never_used: names of the tensors that this worker has never had a use for.
    """

    comm: Communicator
    arena: Arena
    layer_of: Mapping[str, int]
    layers: int
    parameters: Array
    gradients: Array
    pieces: Sequence[Piece]
    state: Sequence[Mapping[str, Array]]
    counted: Sequence[slice]
    summation: Callable[[], Summation]
    dense: Dense
    agrees_late: bool = False
    never_used: Callable[[], Set[str]] = frozenset

    def tensors(self) -> list[Tensor]:
        """In the order of the model."""
        return sorted(self.arena.tensors, key=lambda tensor: self.layer_of[tensor.name])

    def fragments(self, count: int) -> list[list[Tensor]]:
        """The tensors of consecutive layers of the whole model, for each of ``count`` fragments.

        Those of a stage of a pipeline are its part of the model's.
        """
        found: list[list[Tensor]] = [[] for _ in range(count)]
        for tensor in self.tensors():
            found[self.layer_of[tensor.name] * count // self.layers].append(tensor)
        return found

    def squares(self, flat: Array) -> float:
        """Sum of the squares of the elements that this rank answers for."""
        return float(sum(np.square(flat[part], dtype=float).sum() for part in self.counted))

    def slot(self, name: str) -> Array:
        """A slot of the optimiser's state as a flat array, a copy."""
        flat = np.empty_like(self.parameters)
        for piece, state in zip(self.pieces, self.state, strict=True):
            flat[piece.start : piece.stop] = state[name]
        return flat

    def put_slot(self, name: str, flat: Array) -> None:
        """Write it back."""
        for piece, state in zip(self.pieces, self.state, strict=True):
            state[name][...] = flat[piece.start : piece.stop]


def layer_numbers(model: SequentialModel) -> dict[str, int]:
    """The first layer of the model that has a tensor, by its name."""
    found: dict[str, int] = {}
    for number, (name, layer) in enumerate(model.layers.items()):
        for own in layer.shapes():
            found.setdefault(layer.tied.get(own, f"{name}.{own}"), number)
    return found
