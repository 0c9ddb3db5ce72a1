"""The server's step: the mean change of the clients is the gradient that its optimiser takes."""

from typing import cast

import numpy as np

from mpitrain.arrays import Array
from mpitrain.config import Optim
from mpitrain.federated.exact_mean import subtract
from mpitrain.optim import groups
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.store import overlaps
from mpitrain.training import build
from mpitrain.training.parts import Parts
from mpitrain.update.updater import Updater


class ServerOptimizer(Updater):
    """Moves the weights.

    Each rank moves all of them by itself, without a sum over ranks, so that the bits are the same
    on any number of ranks (Reddi et al., "Adaptive Federated Optimization", ICLR 2021)."""

    def __init__(self, parts: Parts) -> None:
        own = parts.config.federated
        table = Optim(
            own.server, momentum=own.server_momentum, beta1=own.server_beta1,
            beta2=own.server_beta2, epsilon=own.server_epsilon,
        )  # fmt: skip
        rule, average = build.optimizer(table), parts.config.optim.average
        super().__init__(parts.store, rule, groups.one(rule), parts.gradient, None, average)
        self._own = own

    @property
    def is_plain(self) -> bool:
        """Whether the weights become the clients' mean."""
        own = self._own
        return own.server == "sgd" and own.server_lr == 1.0 and not own.server_momentum

    def move(self, change: tuple[Array, Array]) -> None:
        """Take one step against the mean change, which is the sum of two float64 arrays."""
        store = cast(Replicated, self.store)
        if not self.is_plain:
            store.gradients[...] = change[0] + change[1]
            self.step(self._own.server_lr)
            return
        # The difference is rounded once, so that a lone client's weights become the server's.
        store.parameters[...] = subtract(store.parameters, change)
        self.steps += 1
        self.average()

    def _rates(self, lr: float, directions: list[Array]) -> list[Array]:
        rates = []
        for piece, direction in zip(self.store.pieces, directions, strict=True):
            rate = np.empty(piece.parameters.size)
            for _, part in overlaps(self.store.arena.tensors, piece):
                three = piece.parameters, piece.gradients, direction
                norms = [float(np.linalg.norm(array[part].astype(np.float64))) for array in three]
                rate[part] = lr * self.optimizer.ratio(*norms)
            rates.append(rate.astype(piece.parameters.dtype))
        return rates
