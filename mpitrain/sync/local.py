"""Local SGD, post-local SGD and DiLoCo.

Each worker trains by itself for ``period`` steps.  Then the workers average their outer gradients
``anchor - weights``, and an outer optimiser moves the anchor by the mean (Stich 2019; Lin et al.
2020; Douillard et al. 2023).
"""

import numpy as np

from mpitrain.config import Sync
from mpitrain.config.sync import parse_outer
from mpitrain.optim.optimizers import SGD
from mpitrain.sync.anchored import Anchored
from mpitrain.sync.workers import Workers
from mpitrain.update.updater import AVERAGE


class Local(Anchored):
    """The workers average their outer gradients.

    Cost of a period: an all-reduce of the parameters, and of the optimiser's state if that is
    averaged, too.  Memory, in arrays as large as the parameters, in addition to
    :class:`~mpitrain.sync.anchored.Anchored`: one, and one for an outer velocity.
    """

    def __init__(self, workers: Workers, sync: Sync) -> None:
        """Set up the exchange; collective."""
        super().__init__(workers, sync)
        name, options = parse_outer(sync.outer)
        #: Optimiser of the anchor; None: the anchor moves to the average of the workers' weights.
        self._outer = (
            SGD(options.momentum, nesterov=name == "nesterov") if name != "plain" else None
        )
        self._rate = options.lr
        like = workers.parameters
        self._velocity = np.zeros_like(like if self._outer else like[:0])
        if self._outer:
            self.shared["outer_velocity"] = self._velocity

    def _after(self, done: int) -> None:
        if done % self._sync.period:
            return
        weights, anchor, (exchange,) = self.workers.parameters, self.anchor, self.exchanges
        if self.keeps_all and self._outer is None:
            anchor[...] = weights  # in floating point x - (x - w) is not w
            return
        self._look()
        np.subtract(anchor, weights, out=exchange.values)
        exchange.start(self._sync.start + done - 1)
        self._wait(exchange)
        if self._outer is None:
            anchor -= exchange.values
        else:
            state = {"velocity": self._velocity}
            way = self._outer.prepare(anchor, exchange.values, state, 1)
            self._outer.apply(anchor, way, state, self._rate)
        weights[...] = anchor
        if self._sync.state == "averaged":
            self._average_state()

    def _average_state(self) -> None:
        # The moving average follows the weights, not the gradients.
        pieces = list(zip(self.workers.pieces, self.workers.state, strict=True))
        for name in [name for name in pieces[0][1] if name != AVERAGE] if pieces else ():
            flat = np.empty_like(self.anchor)
            for piece, state in pieces:
                flat[piece.start : piece.stop] = state[name]
            flat = self.mean(flat)
            for piece, state in pieces:
                state[name][...] = flat[piece.start : piece.stop]
