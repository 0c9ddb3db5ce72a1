"""Trust ratios of LARS and LAMB, which scale the learning rate of each tensor, over all ranks."""

from collections.abc import Sequence

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.device import HOST, Device
from mpitrain.kernels import square_sum
from mpitrain.optim.groups import Grouping
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.parallel.store import Store, overlaps


class TrustRatios:
    """Trust ratios from norms of tensors, whose parts may lie on several ranks.

    You et al. 2017 (LARS) and 2020 (LAMB).
    """

    def __init__(
        self,
        grid: ProcessGrid,
        store: Store,
        worker: Communicator | None = None,
        device: Device = HOST,
    ) -> None:
        """``worker``: the ranks that share one gradient; None: all ranks share it."""
        self._grid, self._store, self._device = grid, store, device
        self._worker = worker or grid.comm
        self._rows: dict[str, int] | None = None

    def rates(self, lr: float, grouping: Grouping, directions: Sequence[Array]) -> list[Array]:
        """lr times the trust ratio of each element's tensor, for each piece; collective.

        Args:
            lr: learning rate, which the rates of groups multiply.
            grouping: how each tensor is updated.
            directions: update direction of each piece, with the shape of its parameters.
        """
        row = self._row_of()
        xp = self._device.xp
        squares = xp.zeros((len(row), 3))
        for piece, direction in zip(self._store.pieces, directions, strict=True):
            if not self._grid.counts(piece.group):
                continue
            counted = self._store.counted(piece)
            for tensor, part in overlaps(self._store.arena.tensors, piece, counted):
                for column, array in enumerate((piece.parameters, piece.gradients, direction)):
                    cell = squares[row[tensor.name], column : column + 1]
                    cell += square_sum(array[part])
        self._device.add_up(self._worker, squares)
        norms = xp.sqrt(squares).T
        ratios: dict[int, Array] = {}
        rates = []
        for piece in self._store.pieces:
            rate = xp.empty(piece.parameters.size, piece.parameters.dtype)
            for tensor, part in overlaps(self._store.arena.tensors, piece):
                group = grouping(tensor.name)
                if id(group) not in ratios:
                    ratios[id(group)] = lr * group.rate * group.optimizer.ratio(*norms)
                rate[part] = ratios[id(group)][row[tensor.name]]
            rates.append(rate)
        return rates

    def _row_of(self) -> dict[str, int]:
        """Row number of each tensor of the ranks that share a gradient; first call collective."""
        if self._rows is None:
            own = sorted(tensor.name for tensor in self._store.arena.tensors)
            names = {name for names in self._worker.allgather(own) for name in names}
            self._rows = {name: index for index, name in enumerate(sorted(names))}
        return self._rows
