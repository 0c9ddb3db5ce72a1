"""A worker between two meetings: it pulls, computes and pushes, batch by batch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from math import isfinite, isnan, sqrt
from time import perf_counter
from typing import cast

import numpy as np

from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from mpitrain.kernels import square_sum
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.server.account import RankReport
from mpitrain.server.hogwild import HogwildTables, NodeCopy, Unlocked
from mpitrain.server.messages import MessageKind, ParameterExchange, Servers
from mpitrain.server.roles import Members
from mpitrain.server.store import WorkerStore
from mpitrain.training.batches import MicroBatches
from mpitrain.training.feed import Held
from mpitrain.training.loop import Batch, compute_gradient
from mpitrain.training.parts import Parts
from mpitrain.training.passes import Passes
from mpitrain.update.agreement import NonFinite, nonfinite_message


class Worker:
    """A rank that computes.  The first of a group sends the messages of all of it."""

    def __init__(self, parts: Parts, members: Members, passes: Passes, own: Sequence[int]) -> None:
        """Bind the messages; ``own``: micro-batches of this worker."""
        self._parts, self._passes, self._own = parts, passes, own
        self._group, self._server = members.group, parts.config.server
        self._rate = parts.rates.rate
        passes.runner()
        self._feed = parts.feed.among(members.group)
        self._told = RankReport()
        self._link = _link(parts, members)
        if self._link:
            parts.opened.callback(self._link.free)
        self._store = store = cast(WholeGradients, parts.store)
        #: Parameters as they were pulled.
        self._parameters = store.spread.flat if isinstance(store, WorkerStore) else np.empty(0)
        #: Gradients that are not pushed yet, where a push has several.
        self._kept = np.zeros_like(store.gradients) if self._server.push > 1 else store.gradients

    def act(self, batch: Batch, first: int) -> RankReport:
        """Take all batches, in turn and at this worker's pace.

        Raises:
            DataError: a sample cannot be read; the servers know that this worker has failed.
            NonFinite: a loss or gradient is not finite; so do they.
            ConfigError: a parameter has no part in the loss; so do they.
        """
        feed, link = self._feed, self._link
        reading = feed.batches(
            "train",
            batch.epoch,
            batch.indices,
            1,
            self._passes.micro_batches,
            lambda steps: self._own,
        )
        told = self._told = RankReport(leads=link is not None)

        def timed() -> Iterator[tuple[list[Array], Held]]:
            for some in reading:
                told.reading += feed.read_seconds
                yield some

        with closing(reading):
            self._until(first, first + len(batch.indices), timed())
        if link:
            told.sent, link.sent = link.sent, Counter()
            told.squares, link.squares = link.squares, {}
        return told

    def _until(self, first: int, stop: int, reading: Iterable[tuple[list[Array], Held]]) -> None:
        """Take the batches ``first <= i < stop``, but those whose steps are over."""
        clock, pulled = first, first - 1
        try:
            for clock, (batches, held) in enumerate(reading, first):
                if pulled < clock and (clock - first) % self._server.fetch == 0:
                    if (found := self._pull(clock)) is None:
                        break
                    pulled = found
                if pulled <= clock:
                    self._clock(clock, batches[0], held)
                    self._push(clock, first, stop)
        except (DataError, NonFinite, ConfigError):
            self._end(MessageKind.FAILED, clock)
            raise
        self._end(MessageKind.DONE, clock)

    def _pull(self, clock: int) -> int | None:
        start = perf_counter()
        found = self._link.pull(clock) if self._link else clock
        if self._group.size > 1:
            found = self._group.bcast(found)
            if found is not None:
                self._group.Bcast(self._parameters, 0, algorithm="native")
        self._parts.passes.forget_rounded()
        self._told.pulling += perf_counter() - start
        return found

    def _clock(self, clock: int, batch: Array, held: Held) -> None:
        source = self._passes.source(held, [batch])
        loss, unused = self._compute(clock, source)
        has_samples = any(map(len, held.values()))  # a last batch may have fewer than workers
        if self._group.size > 1:
            losses, names, some = zip(*self._group.allgather((loss, unused, has_samples)))
            loss, unused, has_samples = sum(losses), frozenset.intersection(*names), any(some)
        if unused and has_samples:
            raise ConfigError(
                f"server: {min(unused)} has no part in the loss of step {clock + 1}, and servers "
                "update all parameters; freeze it (requires_grad = False), or train without servers"
            )
        norm = sqrt(square_sum(self._store.gradients))
        self._told.losses[clock], self._told.norms[clock] = loss, norm
        if not (isfinite(loss) and isfinite(norm)):
            data = source.unfit(nothing_counts=isnan(source.counted))
            if self._group.size > 1:
                data = next(filter(None, self._group.allgather(data)), "")
            raise NonFinite(nonfinite_message(clock + 1, "", data, also="a smaller server.bound"))
        if self._server.fetch > 1:  # Downpour's own steps, until the next pull
            for tensor in self._parts.arena.tensors:
                own, group = (
                    slice(tensor.start, tensor.stop),
                    self._parts.updater.grouping(tensor.name),
                )
                rate = self._rate(clock) * group.at(clock).rate
                self._parameters[own] -= rate * self._store.gradients[own]
            self._parts.passes.forget_rounded()

    def _push(self, clock: int, first: int, stop: int) -> None:
        start = perf_counter()
        kept = self._kept
        if self._server.push > 1:
            kept += self._store.gradients
        clocks = (clock - first) % self._server.push + 1
        if clocks == self._server.push or clock + 1 == stop:
            if self._link:
                self._link.push(clock + 1 - clocks, clocks, kept, self._rate(clock))
            if self._server.push > 1:
                kept[...] = 0
        self._told.pushing += perf_counter() - start

    def _end(self, kind: MessageKind, clock: int) -> None:
        start = perf_counter()
        if self._link:
            self._link.end(kind, clock)
        self._kept[...] = 0
        self._told.pushing += perf_counter() - start

    # Overflow ends in a loss that is not finite, which ends the run.
    @np.errstate(over="ignore", invalid="ignore")
    def _compute(self, clock: int, source: MicroBatches) -> tuple[float, frozenset[str]]:
        """Take this worker's part of a batch forward and backward.

        Returns:
            Its part of the mean loss, and the names of the parameters without a part in it.
        """
        parts, passes = self._parts, self._passes
        if not isinstance(self._link, HogwildTables):  # begins before all ranks meet
            begin(parts, clock)
        parts.store.reset()
        loss = compute_gradient(parts, passes, clock, source).loss
        names = frozenset(tensor.name for tensor in parts.arena.tensors)
        return cast(float, loss), names - parts.store.used


def begin(parts: Parts, step: int) -> None:
    """Begin a step, counted from 0, on this rank."""
    parts.steps_done = step
    parts.before_step(parts)


def _link(parts: Parts, members: Members) -> ParameterExchange | None:
    """A worker's messages to the servers, on the first rank of a group."""
    if isinstance(store := parts.store, NodeCopy):
        if parts.config.server.hogwild == "tables":
            return HogwildTables(store, partial(begin, parts))
        return Unlocked(store.flat)
    if members.group.rank > 0:
        return None
    return Servers(parts, members)
