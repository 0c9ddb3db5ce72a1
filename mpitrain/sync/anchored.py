"""Workers that train by themselves from a common anchor, the weights of their last exchange.

A worker's weights are the anchor plus its own updates since.  Between exchanges the mean of the
workers' weights equals the weights of one process that applies the mean of their updates.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from mpitrain.arrays import Array
from mpitrain.parallel.summation import Keeper
from mpitrain.step.agreement import Agreed, StepReport
from mpitrain.step.gradient import GlobalGradient
from mpitrain.sync.exchange import Exchange, Selection
from mpitrain.sync.strategy import Strategy
from mpitrain.sync.workers import Workers


class Anchored(Strategy, ABC):
    """Keeps the anchor and averages workers; a subclass decides when workers exchange.

    A worker's gradient is that of its own samples, times the number of workers, so that the mean
    over the workers is the gradient of the batch, even if their numbers of samples differ.

    Memory: two arrays as large as the parameters, the anchor and one for means.

    Attributes:
        anchor: common weights, shape (arena.size,); the same bits on all workers after each step.
        workers: this rank's worker, and its peers in the others.
    """

    drifts = True

    def __init__(self, workers: Workers, start: int) -> None:
        """Set up the mean over the workers; collective over ``workers.comm``.

        Args:
            workers: this rank's worker, and its peers in the others.
            start: number of first steps, in which the workers average their gradients.
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
        """Whether exchanges change nothing: there is one worker, and no codec."""
        return self.is_alone and not self._largest().summation.acts_alone

    @property
    def keepers(self) -> Sequence[Keeper]:
        return [exchange.summation for exchange in self._exchanges()]

    @abstractmethod
    def _exchanges(self) -> Sequence[Exchange]:
        """The exchanges of the strategy."""

    @abstractmethod
    def _after(self, done: int) -> None:
        """Start exchanges, and apply due ones, ``done`` steps after the first ``start`` steps."""

    @abstractmethod
    def _takes_effect(self, done: int) -> bool:
        """Whether an exchange takes effect after ``done`` steps."""

    def begin(self) -> None:
        self.anchor[...] = self.workers.parameters

    def agree(self, step: int, gradient: GlobalGradient, own: StepReport) -> Agreed:
        averages = step < self._start and not self.is_alone
        if averages:
            gradients = self.workers.gradients
            gradients[...] = self.mean(gradients)
        agreed = gradient.agree_within(own) if self._agrees_late else gradient.agree(own)
        self.strayed = (0.0, 0.0)
        # With averaged gradients a tensor is unused only if no worker has used it.
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
        """Measure the worker's distance from the anchor, before an exchange changes it."""
        away = self.workers.squares(self.workers.parameters - self.anchor)
        self.strayed = away, self.workers.squares(self.anchor)
