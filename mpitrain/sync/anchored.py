"""Workers that train by themselves from a common anchor, the weights of their last exchange.

A worker's weights are the anchor plus its own updates since.  Between exchanges the mean of the
workers' weights equals the weights of one process that applies the mean of their updates.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mpitrain.arrays import Array
from mpitrain.config import Sync
from mpitrain.parallel.summation import Summation
from mpitrain.sync.exchange import Exchange
from mpitrain.sync.workers import Workers


class Anchored(ABC):
    """Keeps the anchor and averages workers; a subclass decides when workers exchange.

    It is a :class:`~mpitrain.training.strategy.Strategy`.

    A worker's gradient is that of its own samples, times the number of workers, so that the mean
    over the workers is the gradient of the batch, even if their numbers of samples differ.

    Memory: two arrays as large as the parameters, the anchor and one for means.

    Attributes:
        anchor: common weights, shape (arena.size,); the same bits on all workers after each step.
        workers: this rank's worker, and its peers in the others.
        exchanges: exchanges of the strategy.
        shared, keepers, strayed: see the protocol.
        is_alone: whether there is one worker only.
        keeps_all: whether exchanges change nothing: there is one worker, and no codec.
        algorithm, reason: how an exchange is summed, and why so.
    """

    def __init__(self, workers: Workers, sync: Sync, count: int = 1) -> None:
        """Set up ``count`` exchanges, which may be under way together; collective."""
        self.workers, self._sync = workers, sync
        self.anchor = workers.parameters.copy()
        self._all = Exchange(workers, workers.dense)
        self.exchanges = [Exchange(workers, workers.summation()) for _ in range(count)]
        first = self.exchanges[0]
        self.algorithm, self.reason = first.algorithm, first.reason
        self.is_alone = workers.comm.size == 1
        self.keeps_all = self.is_alone and not first.summation.acts_alone
        self.keepers: Sequence[Summation] = [exchange.summation for exchange in self.exchanges]
        self.shared = {"anchor": self.anchor}
        self.strayed = 0.0, 0.0

    @abstractmethod
    def _after(self, done: int) -> None:
        """Start exchanges, and apply due ones, ``done`` steps after the first ``start`` steps."""

    def begin(self, steps_done: int | None = None) -> None:
        self.quiesce()
        self.strayed = 0.0, 0.0
        if steps_done is None:
            self.anchor[...] = self.workers.parameters

    def after_step(self, step: int) -> None:
        """Exchange what is due after a step, counted from 0, taken or skipped."""
        if step < self._sync.start:
            self.begin()
        else:
            self._after(step + 1 - self._sync.start)

    def progress(self) -> None:
        """Move exchanges along without waiting."""
        for exchange in self.exchanges:
            exchange.test()

    def quiesce(self) -> None:
        for exchange in self.exchanges:
            self._wait(exchange)

    def consensus(self) -> Array:
        if self.is_alone:
            return self.workers.parameters.copy()
        return self.anchor + self.mean(self.workers.parameters - self.anchor)

    def mean(self, flat: Array, by: Exchange | None = None) -> Array:
        if self.is_alone:
            return flat
        by = by or self._all
        by.values[...] = flat
        by.start(0)
        self._wait(by)
        return by.values.copy()

    def drain(self) -> None:
        self.workers.parameters[...] = self.consensus()
        self.begin()

    def state(self) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        self.quiesce()
        return {}, {}

    def close(self) -> None:
        """Free what is bound to communicators; collective."""
        self.quiesce()
        for exchange in (self._all, *self.exchanges):
            exchange.close()

    def _wait(self, exchange: Exchange) -> None:
        exchange.wait(self.exchanges)

    def _look(self) -> None:
        """Measure the worker's distance from the anchor, before an exchange changes it."""
        away = self.workers.squares(self.workers.parameters - self.anchor)
        self.strayed = away, self.workers.squares(self.anchor)
