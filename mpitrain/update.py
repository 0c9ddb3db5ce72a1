"""The update of the parameters: norms over all ranks, clipping, and each rank's pieces."""

from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arena import Tensor
from mpitrain.arrays import Array, array_namespace
from mpitrain.config import ConfigError
from mpitrain.groups import Group, Grouping
from mpitrain.optim import Optimizer
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.parallel.store import Allocate, Piece, Store

#: The slot of the moving average of parameters, beside those of the optimiser.
AVERAGE = "average"


class NonFinite(ArithmeticError):
    """A loss or gradient is infinite or not a number; the message says whose."""


@dataclass(frozen=True)
class Told:
    """What a rank tells the others of a step.

    Attributes:
        loss: its part of the mean over the global batch.
        seconds: that the step took it.
        comm_seconds: those of them in the sum of gradients.
        wait_seconds: those of them in waiting for other ranks.
        read_seconds: those of them in reading samples, or waiting for who reads them ahead.
        stopping: whether it was asked to stop.
        sent_bytes, shared_bytes: that it has sent in messages, and moved in shared memory.
    """

    loss: float
    seconds: float = 0.0
    comm_seconds: float = 0.0
    wait_seconds: float = 0.0
    read_seconds: float = 0.0
    stopping: bool = False
    sent_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step.

    Attributes:
        loss: mean over the global batch.
        grad_norm: Euclidean norm of the global gradient, before clipping.
        seconds, comm_seconds, wait_seconds, read_seconds: sums over the ranks of what each told.
        stopping: whether one of them was asked to stop.
        sent_bytes, shared_bytes: sums over the ranks.
    """

    loss: float
    grad_norm: float
    seconds: float
    comm_seconds: float
    wait_seconds: float
    read_seconds: float
    stopping: bool
    sent_bytes: float
    shared_bytes: float

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are."""
        return isfinite(self.loss) and isfinite(self.grad_norm)


class Updater:
    """Optimiser state of a store's pieces, and the step.

    The moving average of the parameters is a part of that state: who has an element's momentum has
    its average, and what shards, compares and saves the one does so with the other.

    Attributes:
        state: arrays by slot, for each piece.
        steps: that were taken.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        store: Store,
        optimizer: Optimizer,
        grouping: Grouping,
        allocate: Allocate | None = None,
        average: float = 0.0,
    ) -> None:
        """Make the state.

        Args:
            grid: who does what.
            store: whose pieces are updated.
            optimizer: its kind says what state there is.
            grouping: how each tensor is updated.
            allocate: makes each array, ``allocate(size, dtype)``; zeros if left out.
            average: part of the moving average that a step leaves; 0: there is none.

        Raises:
            ConfigError: the optimiser has a slot of the average's name.
        """
        if average and AVERAGE in optimizer.slots:
            raise ConfigError(
                f"optim.average: the optimiser has a slot {AVERAGE!r} of its own; rename it, or "
                "leave optim.average out"
            )
        self._grid = grid
        self._store = store
        self.optimizer = optimizer
        self.steps = 0
        self.state: list[dict[str, Array]] = [
            {slot: _zeros(piece.parameters, allocate) for slot in optimizer.slots}
            for piece in store.pieces
        ]
        self._grouping = grouping
        self._runs = [self._groups_of(piece) for piece in store.pieces]
        self._average = average
        if average:
            for piece, state in zip(store.pieces, self.state, strict=True):
                state[AVERAGE] = _zeros(piece.parameters, allocate)
                state[AVERAGE][...] = piece.parameters

    def agree(self, own: Told) -> Agreed:
        """Sum what the ranks tell, and their parts of the squared norm; collective, one message."""
        told = own.seconds, own.comm_seconds, own.wait_seconds, own.read_seconds, own.stopping
        moved = own.sent_bytes, own.shared_bytes
        values = np.array([own.loss, self.own_squares(), *told, *moved], float)
        self._grid.comm.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM, algorithm="native")
        loss, squared, seconds, reducing, waiting, reading, stopping, *moved = values.tolist()
        norm = sqrt(squared) if squared >= 0 else squared
        return Agreed(loss, norm, seconds, reducing, waiting, reading, stopping > 0, *moved)

    def own_squares(self) -> float:
        """The own part of the squared norm of the gradient."""
        return sum(
            square_sum(piece.gradients[self._store.counted(piece)])
            for piece in self._store.pieces
            if self._grid.counts(piece.group)
        )

    def culprits(self, loss: float) -> str:
        """Which ranks have a loss or gradients that are not finite, and where; collective."""
        comm = self._grid.comm
        own = [] if isfinite(loss) else ["the loss"]
        own += [
            tensor.name
            for piece in self._store.pieces
            for tensor, part in overlaps(self._store.arena.tensors, piece)
            if not isfinite(square_sum(piece.gradients[part]))
        ]
        found = comm.allgather(own)
        # Where a loss is not finite, every gradient follows from it.
        if any("the loss" in names for names in found):
            found = [["the loss"] if "the loss" in names else [] for names in found]
        named = [
            f"rank {rank}: {', '.join(names[:3])}" for rank, names in enumerate(found) if names
        ]
        return "; ".join(named[:4]) or "their sum is too large"

    def replicas(self) -> list[tuple[Communicator, dict[str, Array]]]:
        """What other ranks hold, too, by name: parameters and optimiser state, for each group."""
        if not self._store.is_replicated:
            return []
        found = []
        for piece, state in zip(self._store.pieces, self.state, strict=True):
            arrays = {}
            for tensor, part in overlaps(self._store.arena.tensors, piece):
                arrays[tensor.name] = piece.parameters[part]
                arrays |= {f"{slot} of {tensor.name}": own[part] for slot, own in state.items()}
            found.append((self._grid.groups[piece.group], arrays))
        return found

    def step(self, lr: float, gradient_scale: float = 1.0) -> None:
        """Update the own pieces; ``gradient_scale`` multiplies the gradients first."""
        self.steps += 1
        directions: list[list[Array]] = []
        for piece, state, runs in zip(self._store.pieces, self.state, self._runs, strict=True):
            if gradient_scale != 1.0:
                piece.gradients[...] *= gradient_scale
            directions.append([])
            for part, group in runs:
                own = {slot: array[part] for slot, array in state.items()}
                parameters, gradients = piece.parameters[part], piece.gradients[part]
                found = group.optimizer.prepare(parameters, gradients, own, self.steps)
                directions[-1].append(found)
        rates = self._rates(lr, directions) if self.optimizer.layerwise else None
        for index, (piece, state) in enumerate(zip(self._store.pieces, self.state, strict=True)):
            for (part, group), direction in zip(self._runs[index], directions[index], strict=True):
                own = {slot: array[part] for slot, array in state.items()}
                rate = lr * group.rate if rates is None else rates[index][part]
                group.optimizer.apply(piece.parameters[part], direction, own, rate)
            if self._average:
                state[AVERAGE] += (1.0 - self._average) * (piece.parameters - state[AVERAGE])

    def exchange(self) -> None:
        """Parameters and their averages change places in the own pieces; twice, they are back."""
        for piece, state in zip(self._store.pieces, self.state, strict=True):
            trained = piece.parameters.copy()
            piece.parameters[...] = state[AVERAGE]
            state[AVERAGE][...] = trained

    def _groups_of(self, piece: Piece) -> list[tuple[slice, Group]]:
        """The parts of a piece, one after the other, that are updated alike."""
        found: list[tuple[slice, Group]] = []
        for tensor, part in overlaps(self._store.arena.tensors, piece):
            group = self._grouping(tensor.name)
            if found and found[-1][1] is group:
                part = slice(found.pop()[0].start, part.stop)
            found.append((part, group))
        return found

    def _rates(self, lr: float, directions: list[list[Array]]) -> list[Array]:
        """lr times the trust ratio of each element's tensor, from norms of whole tensors."""
        comm: Communicator = self._grid.comm
        names = sorted(
            {
                name
                for own in comm.allgather(sorted(t.name for t in self._store.arena.tensors))
                for name in own
            }
        )
        row = {name: index for index, name in enumerate(names)}
        squares = np.zeros((len(names), 3))
        for piece, parts in zip(self._store.pieces, directions):
            if not self._grid.counts(piece.group):
                continue
            direction = parts[0] if len(parts) == 1 else np.concatenate(parts)
            counted = self._store.counted(piece)
            for tensor, part in overlaps(self._store.arena.tensors, piece, counted):
                arrays = (piece.parameters, piece.gradients, direction)
                squares[row[tensor.name]] += [square_sum(array[part]) for array in arrays]
        comm.Allreduce(MPI.IN_PLACE, squares, algorithm="native")
        rates = []
        for piece in self._store.pieces:
            rate = np.empty(piece.parameters.size, piece.parameters.dtype)
            for tensor, part in overlaps(self._store.arena.tensors, piece):
                norms = np.sqrt(squares[row[tensor.name]])
                group = self._grouping(tensor.name)
                rate[part] = lr * group.rate * group.optimizer.ratio(*norms.tolist())
            rates.append(array_namespace(piece.parameters).asarray(rate))
        return rates


def overlaps(
    tensors: tuple[Tensor, ...], piece: Piece, within: slice | None = None
) -> list[tuple[Tensor, slice]]:
    """The tensors that lie in a piece, or in ``within`` of it, and where in the piece they do."""
    low = piece.start + (within.start if within else 0)
    high = piece.start + (within.stop if within else piece.parameters.size)
    return [
        (
            tensor,
            slice(max(tensor.start, low) - piece.start, min(tensor.stop, high) - piece.start),
        )
        for tensor in tensors
        if max(tensor.start, low) < min(tensor.stop, high)
    ]


def square_sum(x: Array) -> float:
    """Sum of squares, in float64."""
    total = 0.0
    for start in range(0, x.size, 1 << 20):
        part = x[start : start + (1 << 20)].astype(np.float64, copy=False)
        total += float(part @ part)
    return total


def _zeros(like: Array, allocate: Allocate | None) -> Array:
    if allocate is None:
        return array_namespace(like).zeros_like(like)
    zeros = allocate(like.size, like.dtype)
    zeros[...] = 0
    return zeros
