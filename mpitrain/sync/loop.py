"""Steps of workers that train by themselves and exchange weights: ``local`` and ``delayed``.

The ranks of a worker share a gradient, and agree on it in each step.  All workers hear of a step at
once, or of several together (``sync.agree``): then each has taken its own steps before, or left
them out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from time import perf_counter
from typing import NamedTuple, cast

import numpy as np

from collectives import Communicator
from mpitrain import extras
from mpitrain.arrays import Array, Scalar
from mpitrain.metrics.records import Record, Skipped, Step
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.sync.anchored import Anchored
from mpitrain.sync.workers import Workers
from mpitrain.training import build
from mpitrain.training.account import Begun
from mpitrain.training.batches import MicroBatches
from mpitrain.training.loop import is_due
from mpitrain.training.parts import Parts
from mpitrain.training.step import SynchronousLoop
from mpitrain.update.agreement import Agreed, NonFinite, StepReport, named, nonfinite_message


class Untold(NamedTuple):
    """A step that the other workers do not know yet.

    Attributes:
        begun: the step.
        numbers: this rank's numbers, to be summed over all ranks.
        failed: names of this worker's tensors that are not finite, if the step was left out.
        unfit: names of samples that are not finite then.
    """

    begun: Begun
    numbers: list[float]
    failed: str
    unfit: str


class DriftingLoop(SynchronousLoop):
    """Each worker updates its own weights by its own gradient, and exchanges them now and then."""

    def __init__(self, parts: Parts) -> None:
        """Make the strategy that [sync] names; collective."""
        super().__init__(parts)
        self.workers, self._every = parts.grid.data.size, parts.config.sync.agree
        self._strategy = parts.strategy = strategy_of(parts)
        self._strayed = 0.0, 0.0
        self._failed = "", ""
        self._untold: list[Untold] = []

    @property
    def sharers(self) -> Communicator:
        is_together = self.parts.steps_done < self.parts.config.sync.start
        return self.parts.comm if is_together and not self._strategy.is_alone else super().sharers

    def adjust_gradient(self) -> float:
        parts, strategy = self.parts, self._strategy
        if self.sharers is parts.gradient.ranks:
            return 0.0
        gradients, is_adasum = strategy.workers.gradients, parts.config.sync.combine == "adasum"
        with parts.span("reduce", "communicate"), parts.comm.waiting("the sum of gradients"):
            began = perf_counter()
            gradients[...] = strategy.mean(gradients, strategy.exchanges[0] if is_adasum else None)
            return perf_counter() - began

    def agree(self, report: StepReport) -> Agreed:
        """Agree within the worker, and with all ranks if they hear of each step; collective."""
        parts, strategy, every = self.parts, self._strategy, self._every
        self._strayed, strategy.strayed = strategy.strayed, (0.0, 0.0)
        copies = 1 if self.sharers is parts.gradient.ranks else self.workers
        own = parts.gradient.agree(report, ranks=self.sharers, copies=copies)
        if every > 1:
            return own
        (found,) = self._sum([self._numbers(report, own)], np.empty(0))
        parts.stopping = bool(found.stopping)
        if found.faults:
            parts.purity.expect(f"step {parts.steps_done + 1}")  # raises
        norm, factor = own.worker_norm, own.mean_factor
        return replace(found, worker_norm=norm, mean_factor=factor, unused=own.unused)

    def roll_back(
        self, agreed: Agreed, loss: Scalar, micro_batches: MicroBatches, state: Mapping[str, Array]
    ) -> Skipped | None:
        if self._every == 1:
            return super().roll_back(agreed, loss, micro_batches, state)
        # This worker alone goes on with its old weights, until all agree and raise.
        failed = ", ".join(self.parts.gradient.own_culprits(loss)[:3])
        unfit = micro_batches.unfit(nothing_counts=agreed.nothing_counts)
        self._failed = failed or "the norm of its gradient", unfit
        return None

    def exchange(self) -> None:
        parts = self.parts
        waiting = parts.comm.waiting("the mean of the workers' weights")
        with parts.account.late("exchange"), waiting:
            self._strategy.after_step(parts.steps_done)

    def record(self, begun: Begun, report: StepReport, agreed: Agreed) -> Sequence[Record]:
        """Records of the steps that all ranks know now, perhaps with a straggler's; collective.

        NonFinite on all ranks: a worker has left out a step.
        """
        parts, done, every = self.parts, self.parts.steps_done, self._every
        if every == 1:
            return super().record(begun, report, agreed)
        is_last = done == parts.total_steps
        is_saved = is_due(parts.config.checkpoint.every, done - 1, done)  # nothing unfit, then
        if is_last:
            report = report.plus(parts.account.take_late())
        self._untold.append(Untold(begun, self._numbers(report, agreed), *self._failed))
        self._failed = "", ""
        meets = is_last or is_saved or not parts.seen or done % every == 0
        return self._tell() if meets else []

    def _numbers(self, report: StepReport, own: Agreed) -> list[float]:
        """Numbers of this rank on a step, of which :meth:`_sum` makes those of all."""
        counted = nan if own.nothing_counts else report.counted
        squares = own.worker_norm**2 * self.workers / self.parts.comm.size
        loss = report.loss * own.mean_factor
        known = replace(report, loss=loss, counted=counted, squares=squares)
        return [*known.numbers, *self._strayed]

    def _sum(self, steps: Sequence[list[float]], more: Array) -> list[Agreed]:
        """Sums of all ranks' numbers on steps; ``more`` is summed in place; one message."""
        values, found = np.append(steps, more), list[Agreed]()
        self.parts.gradient.total(values, self.parts.comm)
        rows, more[...] = np.split(values, [values.size - more.size])
        for row in rows.reshape(len(steps), -1).tolist():
            *numbers, away, anchor = row
            drift = float(np.sqrt(away / anchor)) if anchor else None
            one = Agreed(*numbers, drift=drift)
            norm = float(np.sqrt(one.squares / self.workers))
            found.append(replace(one, grad_norm=norm, worker_norm=norm))
        return found

    def _tell(self) -> Sequence[Record]:
        """Agree on the steps since the last time."""
        parts, found = self.parts, list[Step]()
        steps, self._untold = self._untold, []
        spent = parts.account.spent.copy()
        agreed = self._sum([one.numbers for one in steps], spent)
        parts.stopping = any(one.stopping for one in agreed)
        for one, its in zip(steps, agreed, strict=True):
            if not its.finite:
                failed, unfit = (named(parts.comm, text) for text in (one.failed, one.unfit))
                raise NonFinite(nonfinite_message(one.begun.step, failed, unfit), found)
            found.append(parts.account.record(one.begun, its))
        if any(one.faults for one in agreed):
            parts.purity.expect(f"until step {parts.steps_done}")
        before, done = parts.steps_done - len(found), parts.steps_done
        searches = is_due(parts.config.run.log_every, before, done)
        slow = parts.account.straggler(done, spent) if searches else None
        return [*found, slow] if slow else found


def strategy_of(parts: Parts) -> Anchored:
    """The strategy that [sync] names; collective."""
    config, updater, replica = parts.config, parts.updater, parts.grid.data.rank
    store = cast(Replicated, parts.store)  # the configuration has refused other ones
    workers = Workers(
        comm=parts.grid.data,
        arena=parts.arena,
        parameters=store.parameters,
        gradients=store.gradients,
        pieces=store.pieces,
        state=updater.state,
        owned=parts.gradient.owned(),
        summation=lambda: build.summation(config, replica),
        dense=build.dense(config),
        never_used=lambda: updater.never_used(frozenset(updater.left_out)),
    )
    found: Anchored = getattr(extras, config.sync.kind.title())(workers, config.sync)
    store.algorithm, store.reason, store.beside = found.algorithm, found.reason, found.progress
    parts.opened.callback(found.close)
    return found
