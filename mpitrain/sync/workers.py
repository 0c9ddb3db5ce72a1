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
    """A rank's part of its worker, and its peers: the ranks with the same part of other workers.

    Attributes:
        comm: peers, one rank of each worker, in the order of workers.
        arena: layout of the flat arrays.
        layer_of: number of the first layer in the whole model that has a tensor, by its name.
        layers: number of layers of the whole model.
        parameters, gradients: flat arrays of this worker, shape (arena.size,).
        pieces: pieces of these arrays that are updated; they share the memory.
        state: optimiser state of each piece, by slot.
        counted: elements of the arena that this rank counts in sums over its worker.
        summation: makes the summation for exchanges, dense or with a codec.
        dense: summation without a codec.
        never_used: gives the names of the tensors that this worker has never used.
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
    never_used: Callable[[], Set[str]] = frozenset

    def fragments(self, count: int) -> list[list[Tensor]]:
        """The tensors of consecutive layers of the whole model, for each of ``count`` fragments.

        On a stage of a pipeline, each fragment holds only the tensors of that stage.
        """
        found: list[list[Tensor]] = [[] for _ in range(count)]
        for tensor in self.arena.tensors:
            found[self.layer_of[tensor.name] * count // self.layers].append(tensor)
        return found

    def squares(self, flat: Array) -> float:
        """Sum of the squares of the elements that this rank counts."""
        return float(sum(np.square(flat[part], dtype=float).sum() for part in self.counted))


def layer_numbers(model: SequentialModel) -> dict[str, int]:
    """Number of the first layer of the model that has a tensor, by the tensor's name."""
    found: dict[str, int] = {}
    for number, (name, layer) in enumerate(model.layers.items()):
        for own in layer.shapes():
            found.setdefault(layer.tied.get(own, f"{name}.{own}"), number)
    return found
