"""The update of the parameters: norms over all ranks, clipping, and each rank's pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array, Scalar, array_namespace
from mpitrain.config import ConfigError
from mpitrain.device import HOST, Device
from mpitrain.kernels import kernels_of
from mpitrain.optim.groups import Group, Grouping
from mpitrain.optim.optimizers import Optimizer, step_by
from mpitrain.parallel.arena import Tensor
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.parallel.store import Allocate, Piece, Store
from mpitrain.step.agreement import Agreed, Told, named

#: The slot of the moving average of parameters, beside those of the optimiser.
AVERAGE = "average"


class _Run(NamedTuple):
    """A part of a piece that is updated alike.

    Attributes:
        part: where in the piece.
        group: how.
        left_out: steps that went by without it.
    """

    part: slice
    group: Group
    left_out: int

    def follows(self, other: "_Run") -> bool:
        """Whether both may be updated as one."""
        alike = self.group is other.group and self.left_out == other.left_out
        return alike and self.part.start == other.part.stop


class Updater:
    """Optimiser state of a store's pieces, and the step.

    The moving average of the parameters is a part of that state: who has an element's momentum has
    its average, and what shards, compares and saves the one does so with the other.

    Attributes:
        state: arrays by slot, for each piece.
        steps: that were taken.
        left_out: in how many of them a tensor had no part in the loss, by its name; it stays as it
            is then, state and count of steps included, as torch leaves what has no gradient.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        store: Store,
        optimizer: Optimizer,
        grouping: Grouping,
        allocate: Allocate | None = None,
        average: float = 0.0,
        worker: Communicator | None = None,
        device: Device = HOST,
    ) -> None:
        """Make the state.

        Args:
            grid: who does what.
            store: whose pieces are updated.
            optimizer: its kind says what state there is.
            grouping: how each tensor is updated.
            allocate: makes each array, ``allocate(size, dtype)``; zeros if left out.
            average: part of the moving average that a step leaves; 0: there is none.
            worker: the ranks of our replica, where each replica has gradients of its own; None: all
                ranks have one gradient together.
            device: where arrays are.

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
        self._device = device
        self._one_gradient = worker or grid.comm
        layout = grid.layout
        #: How many gradients there are, and which of them is ours.
        self._gradients = layout.replicas[0] if worker else 1, grid.place.replica if worker else 0
        self.optimizer = optimizer
        self.steps = 0
        self.left_out: dict[str, int] = {}
        self._names: list[str] | None = None
        self._rows: dict[str, int] | None = None
        self._latest_runs: tuple[Any, list[list[_Run]]] | None = None
        self.state: list[dict[str, Array]] = [
            {slot: _zeros(piece.parameters, allocate) for slot in optimizer.slots}
            for piece in store.pieces
        ]
        self._grouping = grouping
        self._average = average
        if average:
            for piece, state in zip(store.pieces, self.state, strict=True):
                state[AVERAGE] = _zeros(piece.parameters, allocate)
                state[AVERAGE][...] = piece.parameters

    def agree(self, own: Told) -> Agreed:
        """Sum what the ranks tell, and their parts of the squared norm; collective, one message."""
        count, ours = self._gradients
        squares = np.zeros(count)
        loss, squares[ours] = self._device.read([own.loss, self.own_squares()])
        own = replace(own, loss=loss)
        missing = len(self._store.used) < len(self._store.arena.tensors)
        values = np.array([*own.numbers, missing, *own.strayed, *squares], float)
        self._grid.comm.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM, algorithm="native")
        squares = values[-count:]
        norm, own_norm = _root(squares.mean()), _root(squares[ours])
        strayed, anchor = values[-count - 2 : -count].tolist()
        drift = _root(strayed / anchor) if anchor else None
        *told, some = values[: -count - 2].tolist()
        unused = self._unused() if some else frozenset[str]()
        return Agreed.of(told, norm, own_norm, drift, unused)

    def _unused(self) -> frozenset[str]:
        """The tensors that no rank has used; collective."""
        comm = self._grid.comm
        if self._names is None:
            every = comm.allgather([tensor.name for tensor in self._store.arena.tensors])
            self._names = sorted({name for names in every for name in names})
        used = np.array([name in self._store.used for name in self._names], np.uint8)
        comm.Allreduce(MPI.IN_PLACE, used, op=MPI.MAX, algorithm="native")
        return frozenset(name for name, found in zip(self._names, used, strict=True) if not found)

    def never_used(self, unused: frozenset[str]) -> frozenset[str]:
        """Of tensors that are unused in the next step, those that have been so in all before."""
        return frozenset(name for name in unused if self.left_out.get(name, 0) == self.steps)

    def agree_within(self, own: Told) -> Agreed:
        """The same of our worker alone, of which nothing is told to others; collective over it.

        Tensors that were not used have gradients of 0.
        """
        loss, squares = self._device.read([own.loss, self.own_squares()])
        values = np.array([*replace(own, loss=loss).numbers, squares], float)
        if self._one_gradient.size > 1:
            self._one_gradient.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM, algorithm="native")
        norm = _root(values[-1])
        return Agreed.of(values[:-1].tolist(), norm, norm)

    def counted(self) -> list[slice]:
        """The elements of the arena for which this rank answers."""
        return [
            slice(piece.start + part.start, piece.start + part.stop)
            for piece in self._store.pieces
            if self._grid.counts(piece.group)
            for part in [self._store.counted(piece)]
        ]

    def slot(self, name: str) -> Array:
        """A slot of the state of pieces that are all of the arena, as a flat array."""
        flat = np.empty(self._store.arena.size, self.state[0][name].dtype)
        for piece, state in zip(self._store.pieces, self.state, strict=True):
            flat[piece.start : piece.stop] = state[name]
        return flat

    def read(self, scalars: Sequence[Scalar]) -> list[float]:
        """As numbers; waits for the device, once."""
        return self._device.read(scalars)

    def own_squares(self) -> Scalar:
        """The own part of the squared norm of the gradient."""
        own = [
            piece.gradients[self._store.counted(piece)]
            for piece in self._store.pieces
            if self._grid.counts(piece.group)
        ]
        return kernels_of(own[0]).square_sum(own) if own else 0.0

    def culprits(self, loss: Scalar) -> str:
        """Which ranks have a loss or gradients that are not finite, and where; collective."""
        found = self._grid.comm.allgather(self.own_culprits(loss))
        # Where a loss is not finite, every gradient follows from it.
        if any("the loss" in names for names in found):
            found = [["the loss"] if "the loss" in names else [] for names in found]
        mine = ", ".join(found[self._grid.comm.rank][:3])
        return named(self._grid.comm, mine) or "their sum is too large"

    def own_culprits(self, loss: Scalar) -> list[str]:
        """What of this rank's is not finite."""
        return ([] if isfinite(float(loss)) else ["the loss"]) + [
            tensor.name
            for piece in self._store.pieces
            for tensor, part in overlaps(self._store.arena.tensors, piece)
            if not isfinite(float(square_sum(piece.gradients[part])))
        ]

    def replicas(
        self, groups: Mapping[str, Communicator]
    ) -> list[tuple[Communicator, dict[str, Array]]]:
        """What other ranks hold, too, by name: parameters and optimiser state, for each group."""
        if not self._store.is_replicated:
            return []
        found = []
        for piece, state in zip(self._store.pieces, self.state, strict=True):
            arrays = {}
            for tensor, part in overlaps(self._store.arena.tensors, piece):
                arrays[tensor.name] = piece.parameters[part]
                arrays |= {f"{slot} of {tensor.name}": own[part] for slot, own in state.items()}
            found.append((groups[piece.group], arrays))
        return found

    def step(
        self,
        lr: float,
        gradient_scale: float = 1.0,
        number: int = 0,
        unused: frozenset[str] = frozenset(),
    ) -> None:
        """Update the own pieces.

        Args:
            lr: what the rates of all groups are factors on.
            gradient_scale: multiplies the gradients first.
            number: of the step, counted from 0, those that were skipped included.
            unused: names of tensors that stay as they are.
        """
        self.steps += 1
        for name in unused:
            self.left_out[name] = self.left_out.get(name, 0) + 1
        runs = self._runs(unused)
        every = zip(self._store.pieces, self.state, runs, strict=True)
        if self.optimizer.layerwise:
            for piece in self._store.pieces if gradient_scale != 1.0 else ():
                piece.gradients[...] *= gradient_scale
            self._step_layerwise(lr, runs)
        else:
            for piece, state, own in every:
                for run in own:
                    group = run.group.at(number)
                    slots = {slot: array[run.part] for slot, array in state.items()}
                    p, g = piece.parameters[run.part], piece.gradients[run.part]
                    taken, rate = self.steps - run.left_out, lr * group.rate
                    step_by(group.optimizer, p, g, slots, taken, rate, gradient_scale)
        for piece, state in zip(self._store.pieces, self.state) if self._average else ():
            state[AVERAGE] += (1.0 - self._average) * (piece.parameters - state[AVERAGE])

    def _step_layerwise(self, lr: float, runs: list[list["_Run"]]) -> None:
        """Where rates follow from whole tensors, all directions are known first."""
        pieces = list(zip(self._store.pieces, self.state, runs, strict=True))
        directions = [
            [self._prepared(piece, state, run, run.group) for run in own]
            for piece, state, own in pieces
        ]
        rates = self._rates(lr, runs, directions)
        for (piece, state, own), of_piece, rate in zip(pieces, directions, rates, strict=True):
            for run, direction in zip(own, of_piece, strict=True):
                slots = {slot: array[run.part] for slot, array in state.items()}
                parameters = piece.parameters[run.part]
                run.group.optimizer.apply(parameters, direction, slots, rate[run.part])

    def _prepared(self, piece: Piece, state: Mapping[str, Array], run: "_Run", of: Group) -> Array:
        """The direction of a part of a piece."""
        slots = {slot: array[run.part] for slot, array in state.items()}
        own = piece.parameters[run.part], piece.gradients[run.part]
        return of.optimizer.prepare(*own, slots, self.steps - run.left_out)

    def exchange(self) -> None:
        """Parameters and their averages change places in the own pieces; twice, they are back."""
        for piece, state in zip(self._store.pieces, self.state, strict=True):
            trained = piece.parameters.copy()
            piece.parameters[...] = state[AVERAGE]
            state[AVERAGE][...] = trained

    def _runs(self, unused: frozenset[str]) -> list[list["_Run"]]:
        """Of each piece; they are usually those of the step before."""
        apart = frozenset(entry for entry in self.left_out.items() if entry[0] not in unused)
        if self._latest_runs is None or self._latest_runs[0] != (unused, apart):
            runs = [self._runs_of(piece, unused) for piece in self._store.pieces]
            self._latest_runs = (unused, apart), runs
        return self._latest_runs[1]

    def _runs_of(self, piece: Piece, unused: frozenset[str]) -> list["_Run"]:
        """The parts of a piece, one after the other, that are updated alike."""
        found: list[_Run] = []
        for tensor, part in overlaps(self._store.arena.tensors, piece):
            if tensor.name in unused:
                continue
            run = _Run(part, self._grouping(tensor.name), self.left_out.get(tensor.name, 0))
            if found and run.follows(found[-1]):
                run = run._replace(part=slice(found.pop().part.start, part.stop))
            found.append(run)
        return found

    def _rates(
        self, lr: float, every: list[list["_Run"]], directions: list[list[Array]]
    ) -> list[Array]:
        """lr times the trust ratio of each element's tensor, from norms of whole tensors."""
        row = self._row_of()
        xp = self._device.xp
        squares = xp.zeros((len(row), 3))
        for piece, runs, parts in zip(self._store.pieces, every, directions):
            if not self._grid.counts(piece.group):
                continue
            direction = xp.zeros_like(piece.parameters)
            for run, found in zip(runs, parts, strict=True):
                direction[run.part] = found
            counted = self._store.counted(piece)
            for tensor, part in overlaps(self._store.arena.tensors, piece, counted):
                for column, array in enumerate((piece.parameters, piece.gradients, direction)):
                    cell = squares[row[tensor.name], column : column + 1]
                    cell += square_sum(array[part])
        self._device.add_up(self._one_gradient, squares)
        norms = xp.sqrt(squares).T
        ratios: dict[int, Array] = {}
        rates = []
        for piece in self._store.pieces:
            rate = xp.empty(piece.parameters.size, piece.parameters.dtype)
            for tensor, part in overlaps(self._store.arena.tensors, piece):
                group = self._grouping(tensor.name)
                if id(group) not in ratios:
                    ratios[id(group)] = lr * group.rate * group.optimizer.ratio(*norms)
                rate[part] = ratios[id(group)][row[tensor.name]]
            rates.append(rate)
        return rates

    def _row_of(self) -> dict[str, int]:
        """A number for each tensor of all ranks that have one gradient; collective once."""
        if self._rows is None:
            own = sorted(tensor.name for tensor in self._store.arena.tensors)
            names = {name for names in self._one_gradient.allgather(own) for name in names}
            self._rows = {name: index for index, name in enumerate(sorted(names))}
        return self._rows


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


def square_sum(x: Array) -> Scalar:
    """Sum of squares, in float64."""
    return kernels_of(x).square_sum([x])


def _root(squared: float) -> float:
    return sqrt(squared) if squared >= 0 else float(squared)


def _zeros(like: Array, allocate: Allocate | None) -> Array:
    if allocate is None:
        return array_namespace(like).zeros_like(like)
    zeros = allocate(like.size, like.dtype)
    zeros[...] = 0
    return zeros
