"""Delayed gradient averaging (Zhu et al. 2021), for any optimiser.

The workers average their updates of ``period`` steps while training goes on: ``delay`` steps later
each worker replaces its own updates by the mean.  Updates are averaged, and not gradients, so that
momentum and Adam stay correct.

A worker's weights are the anchor plus its own updates whose mean is not due yet; the anchor holds
all means that were due.  If no own updates are left, weights and anchor are equal, bit by bit.
Without correction, a worker's updates have no effect before their mean has, and those whose mean is
not due at the end have none.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from mpitrain.arrays import Array
from mpitrain.config import Sync
from mpitrain.sync.anchored import Anchored
from mpitrain.sync.workers import Workers


class Delayed(Anchored):
    """The workers average their updates; the mean takes effect ``delay`` steps later.

    With ``delay = 0`` it takes effect at once, which is local SGD.

    Cost of a period: an all-reduce of the parameters, under way for ``delay`` steps.  Memory, in
    arrays as large as the parameters: one, and two for each of ceil(delay / period) rounds under
    way, in addition to :class:`~mpitrain.sync.anchored.Anchored`.

    Attributes:
        rounds: rounds under way, the oldest first, by the number of steps done when they began.
    """

    def __init__(self, workers: Workers, sync: Sync) -> None:
        """Set up the exchanges, by ``period``, ``delay`` and ``start`` of ``sync``; collective."""
        slots = max(1, -(-sync.delay // sync.period))
        super().__init__(workers, sync, [workers.arena.tensors] * slots)
        self.keeps_all &= sync.correct or not sync.delay
        self._period, self._delay = sync.period, sync.delay
        self.rounds: deque[int] = deque()
        #: The worker's weights at the beginning of the current period.
        self._base = workers.parameters.copy()
        #: This worker's updates in each round, whose mean an exchange computes.
        self._own = [np.zeros_like(workers.parameters) for _ in self.exchanges]

    def begin(self, steps_done: int | None = None) -> None:
        super().begin(steps_done)
        self.rounds.clear()
        if steps_done is None:
            self._base[...] = self.anchor
        elif not self.keeps_all:
            done, period = steps_done - self._sync.start, self._period
            begun = range(period, done + 1, period)
            self.rounds.extend(began for began in begun if done - began < self._delay)

    def _after(self, done: int) -> None:
        if self.keeps_all:  # in floating point x + (w - x) is not w
            self.anchor[...] = self.workers.parameters
            return
        is_starting = done % self._period == 0
        if is_starting:
            self._look()
        if self._delay and self.rounds and done - self.rounds[0] == self._delay:
            self._land(self.rounds.popleft())
        if is_starting:
            self._launch(done)
            if not self._delay:
                self._land(self.rounds.popleft())

    def _slot(self, began: int) -> int:
        return began // self._period % len(self.exchanges)

    def _launch(self, done: int) -> None:
        """Start the mean of the workers' updates in the period that ends."""
        self.rounds.append(done)
        weights, slot = self.workers.parameters, self._slot(done)
        np.subtract(weights, self._base, out=self._own[slot])
        self.exchanges[slot].values[...] = self._own[slot]
        if self._sync.correct:
            self._base[...] = weights
        else:  # as if this worker had done nothing since
            self._own[slot][...], weights[...] = 0, self._base
        self.exchanges[slot].start(self._sync.start + done - 1)

    def _land(self, began: int) -> None:
        """Replace the worker's own updates by the mean."""
        exchange = self.exchanges[self._slot(began)]
        self._wait(exchange)
        self.anchor += exchange.values
        weights = self.workers.parameters
        latest = weights - self._base
        self._base[...] = self.anchor
        for other in self.rounds:
            self._base += self._own[self._slot(other)]
        np.add(self._base, latest, out=weights)

    def state(self) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        self.quiesce()
        slots = range(len(self.exchanges)) if self._delay else ()
        landed = {f"landed{slot}": self.exchanges[slot].values for slot in slots}
        return landed, {"base": self._base} | {f"sent{slot}": self._own[slot] for slot in slots}
