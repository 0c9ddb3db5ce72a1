"""Norms over all ranks: of a step's gradient and of tensors; a search for what is not finite."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from time import perf_counter

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array, Scalar
from mpitrain.config import ConfigError
from mpitrain.device import HOST, Device
from mpitrain.kernels import kernels_of, square_sum
from mpitrain.optim.groups import Grouping
from mpitrain.parallel.arena import COPIES
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.parallel.store import Store, overlaps
from mpitrain.update.agreement import (
    Agreed,
    NonFinite,
    StepReport,
    mean_correction,
    named,
)

#: Rounding of a gradient's norm, by bytes of the numbers: ranks may have other numbers of threads,
#: and training moves copies apart.
_ROUNDING = {2: 2.0**-4, 4: 2.0**-11, 8: 2.0**-26}


@dataclass(eq=False)
class GlobalGradient:
    """The gradient of a step, spread over the stores of all ranks, after its reduction.

    Attributes:
        grid, store, device: those of this rank.
        ranks: those that share one gradient: all, or those of this rank's worker.
        met: seconds of :meth:`total` that no step has reported yet.
    """

    grid: ProcessGrid
    store: Store
    ranks: Communicator
    device: Device = HOST
    met: float = field(init=False, default=0.0)
    _names: list[str] | None = field(init=False, default=None)
    _steps: int = field(init=False, default=0)

    def total(self, values: Array, ranks: Communicator) -> None:
        """Sum a few numbers in place over ``ranks``; the seconds are those of waiting for them."""
        if ranks.size > 1:
            began = perf_counter()
            with ranks.waiting("allreduce of a step's numbers"):
                ranks.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM, algorithm="native")
            self.met += perf_counter() - began

    def agree(
        self, own: StepReport, *, ranks: Communicator | None = None, copies: int = 1
    ) -> Agreed:
        """Sum the reports of the ranks that share the gradient; one all-reduce, and one more if a
        rank has not used a tensor.

        ``ranks``: other ones that share it in this step, where ``copies`` have each element.
        """
        comm = ranks or self.ranks
        some_unused = len(self.store.used) < len(self.store.arena.tensors)
        values = np.array([*own.numbers, some_unused], float)
        self.total(values, comm)
        *numbers, some_unused = values.tolist()
        found = Agreed(*numbers)
        factor = mean_correction(found.labels, float(found.counted))
        norm = sqrt(found.squares / copies * (factor * factor))
        unused = self._unused(comm) if some_unused else frozenset[str]()
        return replace(
            found, loss=found.loss * factor, grad_norm=norm, worker_norm=norm,
            mean_factor=factor, unused=unused,
        )  # fmt: skip

    def _unused(self, comm: Communicator) -> frozenset[str]:
        """Names of the tensors that no rank of ``comm`` has used; these ranks share a model."""
        names = self._known(comm)
        used = np.array([name in self.store.used for name in names], np.uint8)
        comm.Allreduce(MPI.IN_PLACE, used, op=MPI.MAX, algorithm="native")
        return frozenset(name for name, found in zip(names, used, strict=True) if not found)

    def _known(self, comm: Communicator) -> list[str]:
        """Names of all tensors of ``comm``, whose ranks share a model; first call collective."""
        if self._names is None:
            every = comm.allgather([tensor.name for tensor in self.store.arena.tensors])
            self._names = sorted({name for names in every for name in names})
        return self._names

    def owned(self) -> list[slice]:
        """The elements of the arena for which this rank answers."""
        return [
            slice(piece.start + part.start, piece.start + part.stop)
            for piece in self.store.pieces
            if self.grid.owns(piece.group)
            for part in [self.store.owned(piece)]
        ]

    def own_squares(self) -> Scalar:
        """This rank's part of the squared norm of the gradient; not finite where another rank's
        part, of which this one has a copy, is not finite here."""
        own: list[Array] = []
        copies: list[Array] = []
        for piece in self.store.pieces:
            whose = own if self.grid.owns(piece.group) else copies
            whose.append(piece.gradients[self.store.owned(piece)])
        squares = kernels_of(own[0]).square_sum(own) if own else 0.0
        return squares + 0.0 * kernels_of(copies[0]).square_sum(copies) if copies else squares

    def unequal_copies(self, itemsize: int) -> ConfigError | None:
        """The fault that tensor ranks have different gradients of tensors that each of them has
        whole, if they have; in the first of each 64 steps, collective over these ranks.

        ``itemsize``: bytes of the numbers of the passes.
        """
        is_due = self._steps % 64 == 0
        self._steps += 1
        if self.grid.tensor.size == 1 or not is_due:
            return None
        squares: dict[str, list[Scalar]] = {}  # a tensor may lie in several pieces
        for piece in (one for one in self.store.pieces if one.group.endswith(COPIES)):
            owned = self.store.owned(piece)
            for tensor, part in overlaps(self.store.arena.tensors, piece, owned):
                squares.setdefault(tensor.name, []).append(square_sum(piece.gradients[part]))
        if not squares:
            return None
        numbers = iter(self.device.read([one for own in squares.values() for one in own]))
        own = np.sqrt([sum(next(numbers) for _ in parts) for parts in squares.values()])
        own[~np.isfinite(own)] = np.inf  # agree() tells that
        most, least = np.split(self.grid.tensor.sum(np.append(own, -own), MPI.MAX), 2)
        if np.isinf(most).any():
            self._steps = 0  # it tells nothing: look at the next one
        largest = most.max() * (4 if itemsize == 2 else 1 / 8)  # 16 bits round small ones more
        with np.errstate(invalid="ignore"):
            apart = most + least > _ROUNDING[itemsize] * (most + largest)
        if not apart.any():
            return None
        names = [name for name, differs in zip(squares, apart, strict=True) if differs]
        return ConfigError(
            "parallel.tensor: ranks that share the model have different gradients of tensors that "
            f"each of them has whole ({', '.join(names[:3])}): code between columns and rows must "
            "compute with heads and single features alone, as gradients by its other inputs are "
            "lost on the other ranks; change splits=, or leave parallel.tensor out"
        )

    def culprits(self, loss: Scalar) -> str:
        """Text that names the ranks and tensors that are not finite; collective."""
        found = self.grid.comm.allgather(self.own_culprits(loss))
        # A loss that is not finite makes all gradients so; name the loss alone.
        if any("the loss" in names for names in found):
            found = [["the loss"] if "the loss" in names else [] for names in found]
        mine = ", ".join(found[self.grid.comm.rank][:3])
        return named(self.grid.comm, mine) or "their sum is too large"

    def own_culprits(self, loss: Scalar) -> list[str]:
        """Names of this rank's tensors whose gradients are not finite, and of its loss if so."""
        return ([] if isfinite(float(loss)) else ["the loss"]) + self._unfit("gradients")

    def expect_finite(self, done: int) -> None:
        """Raise NonFinite on all ranks if a parameter after ``done`` steps is not; collective."""
        if found := named(self.grid.comm, ", ".join(self._unfit("parameters")[:3])):
            raise NonFinite(
                f"a parameter is not finite after step {done} ({found}), and no checkpoint may "
                "keep it; train --resume goes on from the newest one, with a smaller optim.lr",
                step=done,
            )

    @np.errstate(over="ignore", invalid="ignore")
    def _unfit(self, of: str) -> list[str]:
        """Names of this rank's tensors whose ``gradients`` or ``parameters`` are not finite."""
        return [
            tensor.name
            for piece in self.store.pieces
            for tensor, part in overlaps(self.store.arena.tensors, piece)
            if not isfinite(float(square_sum(getattr(piece, of)[part])))
        ]

    def trust_rates(
        self, lr: float, grouping: Grouping, directions: Sequence[Array]
    ) -> list[Array]:
        """lr times the trust ratio of each element's tensor, for each piece; collective.

        Ratios follow from norms of whole tensors (LARS, You et al. 2017; LAMB, 2020), and of the
        ``directions`` of the pieces, which have the shapes of their parameters.
        """
        row = {name: number for number, name in enumerate(self._known(self.ranks))}
        xp = self.device.xp
        squares = xp.zeros((len(row), 3))
        for piece, direction in zip(self.store.pieces, directions, strict=True):
            if not self.grid.owns(piece.group):
                continue
            owned = self.store.owned(piece)
            for tensor, part in overlaps(self.store.arena.tensors, piece, owned):
                for column, array in enumerate((piece.parameters, piece.gradients, direction)):
                    cell = squares[row[tensor.name], column : column + 1]
                    cell += square_sum(array[part])
        self.device.add_up(self.ranks, squares)
        norms = xp.sqrt(squares).T
        ratios: dict[int, Array] = {}
        rates = []
        for piece in self.store.pieces:
            rate = xp.empty(piece.parameters.size, piece.parameters.dtype)
            for tensor, part in overlaps(self.store.arena.tensors, piece):
                group = grouping(tensor.name)
                if id(group) not in ratios:
                    ratios[id(group)] = lr * group.rate * group.optimizer.ratio(*norms)
                rate[part] = ratios[id(group)][row[tensor.name]]
            rates.append(rate)
        return rates
