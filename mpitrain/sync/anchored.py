"""Workers that train by themselves from a common anchor, the weights of their last exchange.

A worker's weights are the anchor plus its own updates since.  Between exchanges the mean of the
workers' weights equals the weights of one process that applies the mean of their updates.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from mpitrain.arrays import Array
from mpitrain.config import Sync
from mpitrain.parallel.arena import Tensor
from mpitrain.step.agreement import Agreed, StepReport
from mpitrain.step.gradient import GlobalGradient
from mpitrain.sync.exchange import Exchange
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
        exchanges: exchanges of the strategy.
        is_alone: whether there is one worker only.
        keeps_all: whether exchanges change nothing: there is one worker, and no codec.
    """

    def __init__(self, workers: Workers, sync: Sync, parts: Iterable[Iterable[Tensor]]) -> None:
        """Set up an exchange for each of ``parts``, which are tensors; collective."""
        self.workers, self._sync = workers, sync
        self.anchor = workers.parameters.copy()
        self._all = Exchange(workers, workers.tensors(), workers.dense)
        self.exchanges = [Exchange(workers, tensors, workers.summation()) for tensors in parts]
        largest = max(self.exchanges, key=lambda exchange: exchange.chosen.size)
        self.algorithm, self.reason = largest.algorithm, largest.reason
        self.is_alone = workers.comm.size == 1
        self.keeps_all = self.is_alone and not largest.summation.acts_alone
        self.keepers = [exchange.summation for exchange in self.exchanges]

    @abstractmethod
    def _after(self, done: int) -> None:
        """Start exchanges, and apply due ones, ``done`` steps after the first ``start`` steps."""

    def begin(self) -> None:
        self.anchor[...] = self.workers.parameters

    def agree(self, step: int, gradient: GlobalGradient, own: StepReport) -> Agreed:
        averages = step < self._sync.start and not self.is_alone
        if averages:
            gradients = self.workers.gradients
            gradients[...] = self.mean(gradients)
        within = self._sync.agree > 1 and not averages
        agreed = gradient.agree(own, within=within, shared=averages)
        self.strayed = (0.0, 0.0)
        # With averaged gradients a tensor is unused only if no worker has used it.
        return replace(agreed, unused=gradient.unused_by_all()) if averages else agreed

    def after_step(self, step: int) -> None:
        if step < self._sync.start:
            self.begin()
        else:
            self._after(step + 1 - self._sync.start)

    def progress(self) -> None:
        for exchange in self.exchanges:
            exchange.test()

    def quiesce(self) -> None:
        for exchange in self.exchanges:
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

    def close(self) -> None:
        for exchange in (self._all, *self.exchanges):
            exchange.close()

    def _wait(self, exchange: Exchange) -> None:
        exchange.wait(self.exchanges)

    def _look(self) -> None:
        """Measure the worker's distance from the anchor, before an exchange changes it."""
        away = self.workers.squares(self.workers.parameters - self.anchor)
        self.strayed = away, self.workers.squares(self.anchor)
