"""Delayed gradient averaging (Zhu et al. 2021), for any optimiser.

The workers average their updates of ``period`` steps while training goes on: ``delay`` steps later
each worker replaces its own updates by the mean.  Updates are averaged, and not gradients, so that
momentum and Adam stay correct.

A worker's weights are the anchor plus its own updates whose mean is not due yet; the anchor holds
all means that were due.  If no own updates are left, weights and anchor are equal, bit by bit.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Array
from mpitrain.sync.anchored import Anchored
from mpitrain.sync.exchange import Exchange, Selection
from mpitrain.sync.workers import Workers


@dataclass
class DelayedUpdate:
    """The updates of ``period`` steps, while their mean is under way.

    Attributes:
        began: number of steps done when the exchange started.
        own: updates of this worker, shape (arena.size,).
        exchange: computes the mean of the workers' updates.
    """

    began: int
    own: Array
    exchange: Exchange


class Delayed(Anchored):
    """The workers average their updates; the mean takes effect ``delay`` steps later.

    Cost of a period: an all-reduce of the parameters, under way for ``delay`` steps.  Memory, in
    arrays as large as the parameters: one, and two for each of ceil(delay / period) rounds under
    way, in addition to :class:`~mpitrain.sync.anchored.Anchored`.

    Attributes:
        rounds: rounds under way, the oldest first.
    """

    def __init__(self, workers: Workers, *, period: int, delay: int, start: int = 0) -> None:
        """Set up the exchanges; collective.

        Args:
            workers: this rank's worker, and its peers in the others.
            period: steps whose updates are averaged together.
            delay: steps until their mean takes effect; 0: at once, which is local SGD.
            start: number of first steps, in which the workers average their gradients.
        """
        super().__init__(workers, start)
        self._period, self._delay = period, delay
        self.rounds: deque[DelayedUpdate] = deque()
        #: The worker's weights at the beginning of the current period.
        self._base = workers.parameters.copy()
        chosen = Selection(workers.tensors())
        self._slots = [
            Exchange(
                workers.comm, chosen, workers.summation(), workers.parameters, workers.never_used
            )
            for _ in range(max(1, -(-delay // period)))
        ]
        self._own = [np.zeros_like(workers.parameters) for _ in self._slots]
        #: For checkpoints: means that have arrived and are not due yet.
        self._landed = [np.zeros_like(workers.parameters) for _ in self._slots if delay]
        largest = self._largest()
        self.algorithm, self.reason = largest.algorithm, largest.reason

    def _exchanges(self) -> Sequence[Exchange]:
        return self._slots

    def begin(self) -> None:
        super().begin()
        self._base[...] = self.anchor
        self.rounds.clear()

    def _takes_effect(self, done: int) -> bool:
        return done > self._delay and (done - self._delay) % self._period == 0

    def _after(self, done: int) -> None:
        if self.keeps_all:  # in floating point x + (w - x) is not w
            self.anchor[...] = self.workers.parameters
            return
        is_starting = done % self._period == 0
        if is_starting:
            self._look()
        if self._delay and self.rounds and done - self.rounds[0].began == self._delay:
            self._land(self.rounds.popleft())
        if is_starting:
            self._launch(done)
            if not self._delay:
                self._land(self.rounds.popleft())

    def _launch(self, done: int) -> None:
        """Start the mean of the workers' updates in the period that ends."""
        slot = done // self._period % len(self._slots)
        one = DelayedUpdate(done, self._own[slot], self._slots[slot])
        weights = self.workers.parameters
        np.subtract(weights, self._base, out=one.own)
        self._base[...] = weights
        one.exchange.chosen.take(one.own, one.exchange.values)
        one.exchange.start(self._start + done - 1)
        self.rounds.append(one)

    def _land(self, one: DelayedUpdate) -> None:
        """Replace the worker's own updates by the mean."""
        self._wait(one.exchange)
        mean = np.empty_like(self.anchor)
        one.exchange.chosen.put(one.exchange.values, mean)
        self.anchor += mean
        weights = self.workers.parameters
        latest = weights - self._base
        self._base[...] = self.anchor
        for other in self.rounds:
            self._base += other.own
        np.add(self._base, latest, out=weights)

    def quiesce(self) -> None:
        super().quiesce()
        for slot, landed in enumerate(self._landed):
            landed[...] = 0
            self._slots[slot].chosen.put(self._slots[slot].values, landed)

    def arrived(self) -> Mapping[str, Array]:
        return {f"landed{slot}": landed for slot, landed in enumerate(self._landed)}

    def own(self) -> Mapping[str, Array]:
        waiting = enumerate(self._own if self._delay else ())
        return {"base": self._base} | {f"sent{slot}": own for slot, own in waiting}

    def resumed(self, steps_done: int) -> None:
        super().resumed(steps_done)
        self.rounds.clear()
        done = steps_done - self._start
        if self.keeps_all:
            return
        for began in range(self._period, done + 1, self._period):
            if done - began < self._delay:
                slot = began // self._period % len(self._slots)
                exchange = self._slots[slot]
                exchange.chosen.take(self._landed[slot], exchange.values)
                self.rounds.append(DelayedUpdate(began, self._own[slot], exchange))
