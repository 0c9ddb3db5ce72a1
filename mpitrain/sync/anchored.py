"""Workers that train by themselves, each from an anchor that all of them have.

A worker's weights are the anchor and what it has done since.  Between exchanges the mean of the
workers' weights is what one process would have that takes the mean of their updates, at every step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from mpitrain.arrays import Array
from mpitrain.parallel.summation import Keeper
from mpitrain.step.agreement import Agreed, Told
from mpitrain.step.gradient import GlobalGradient
from mpitrain.sync.exchange import Exchange, Selection
from mpitrain.sync.strategy import Strategy
from mpitrain.sync.workers import Workers


class Anchored(Strategy, ABC):
    """The anchor, the first steps, and the mean of the workers; a strategy says when they meet.

    Gradients of a worker are those of its own samples, as many times larger as there are workers:
    their mean over the workers is the gradient of the batch, whatever its parts.

    Cost: two arrays as large as the parameters, the anchor and one for means.

    Attributes:
        anchor: shape (arena.size,), the same bits on all workers after every step.
        workers: as given.
    """

    drifts = True

    def __init__(self, workers: Workers, start: int) -> None:
        """Bind the means; collective over ``workers.comm``.

        Args:
            workers: this rank's, and the others.
            start: first steps, in which the workers average their gradients.
        """
        self._agrees_late = workers.agrees_late
        self.workers = workers
        self.anchor = workers.parameters.copy()
        self._start = start
        self._all = Exchange(
            workers.comm, Selection(workers.tensors()), workers.dense, workers.parameters
        )

    def _largest(self) -> Exchange:
        return max(self._exchanges(), key=lambda exchange: exchange.chosen.size)

    @property
    def is_alone(self) -> bool:
        """Whether there is one worker only."""
        return self.workers.comm.size == 1

    @property
    def keeps_all(self) -> bool:
        """Whether a worker by itself has nothing to exchange, not even with its own codes."""
        return self.is_alone and not self._largest().summation.acts_alone

    @property
    def keepers(self) -> Sequence[Keeper]:
        return [exchange.summation for exchange in self._exchanges()]

    @abstractmethod
    def _exchanges(self) -> Sequence[Exchange]:
        """The exchanges of the strategy."""

    @abstractmethod
    def _after(self, done: int) -> None:
        """Start exchanges, and apply those that are due, ``done`` steps after the first ones."""

    @abstractmethod
    def _takes_effect(self, done: int) -> bool:
        """Whether an exchange takes effect then."""

    def begin(self) -> None:
        self.anchor[...] = self.workers.parameters

    def agree(self, step: int, gradient: GlobalGradient, own: Told) -> Agreed:
        averages = step < self._start and not self.is_alone
        if averages:
            gradients = self.workers.gradients
            gradients[...] = self.mean(gradients)
        agreed = gradient.agree_within(own) if self._agrees_late else gradient.agree(own)
        self.strayed = (0.0, 0.0)
        # A worker by itself leaves alone what its own samples have not used, as one process would.
        return replace(agreed, unused=gradient.unused_by_all()) if averages else agreed

    def after_step(self, step: int) -> float:
        began = perf_counter()
        if step < self._start:
            self.begin()
        else:
            self._after(step + 1 - self._start)
        self._count(step + 1)
        return perf_counter() - began

    def _count(self, steps_done: int) -> None:
        done = steps_done - self._start
        exchanged = done <= 0 or self._takes_effect(done)
        self.exchanges += exchanged
        self.since = 0 if exchanged else self.since + 1

    def progress(self) -> None:
        for exchange in self._exchanges():
            exchange.test()

    def quiesce(self) -> None:
        for exchange in self._exchanges():
            self._wait(exchange)

    def consensus(self) -> Array:
        if self.is_alone:
            return self.workers.parameters.copy()
        return self.anchor + self.mean(self.workers.parameters - self.anchor)

    def mean(self, flat: Array) -> Array:
        if self.is_alone:
            return flat
        found = np.empty_like(flat)
        self._all.chosen.take(flat, self._all.values)
        self._all.start(0)
        self._wait(self._all)
        self._all.chosen.put(self._all.values, found)
        return found

    def drain(self) -> None:
        self.quiesce()
        self.workers.parameters[...] = self.consensus()
        self.begin()

    def shared(self) -> Mapping[str, Array]:
        return {"anchor": self.anchor}

    def resumed(self, steps_done: int) -> None:
        self.exchanges = self.since = 0
        for step in range(steps_done):
            self._count(step + 1)

    def close(self) -> None:
        self._all.close()
        for exchange in self._exchanges():
            exchange.close()

    def _wait(self, exchange: Exchange) -> None:
        exchange.wait(self._exchanges())

    def _look(self) -> None:
        """See how far the worker has strayed, before an exchange ends it."""
        away = self.workers.squares(self.workers.parameters - self.anchor)
        self.strayed = away, self.workers.squares(self.anchor)
