"""PipeDream: a pipeline that does not drain between steps; each stage updates by itself."""

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import NamedTuple, cast

import numpy as np

from mpitrain import nn
from mpitrain.arrays import Array, Scalar, array_namespace
from mpitrain.config import ConfigError
from mpitrain.metrics.records import Step
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.summation import uncountable
from mpitrain.pipeline.actions import Update
from mpitrain.pipeline.runtime import Runner
from mpitrain.pipeline.weights import VersionedWeights
from mpitrain.training.account import Begun
from mpitrain.training.loop import Batch, Loop, count_labels
from mpitrain.training.parts import Parts
from mpitrain.update.agreement import Agreed, NonFinite, StepReport, named, nonfinite_message


class Updated(NamedTuple):
    """Results of a step's updates on one rank, or their sums over the ranks.

    Attributes:
        loss: part of the mean over the batch.
        squares: part of the squared norm of the gradient, mean over the updates.
        comm_seconds: seconds in communication.
        unused: number of tensors that had no part in the loss.
    """

    loss: Scalar
    squares: Scalar
    comm_seconds: float
    unused: float


class UpdateWindow:
    """The updates of one window of steps.

    No update waits for another stage: only replicas of a stage meet, in the sum of their gradients.

    Attributes:
        weights: weights for micro-batches.
    """

    def __init__(self, parts: Parts, runner: Runner) -> None:
        """``runner``: runner of the window's schedule."""
        self._parts = parts
        self._store = cast(Replicated, parts.store)  # the configuration has refused other stores
        self._first = parts.steps_done
        self._unused: list[frozenset[str]] = []
        self.weights = VersionedWeights(
            parts.config.parallel.weights,
            parts.arena,
            self._store.parameters,
            runner.report,
            parts.grid.place[:2],
            self._along_velocity,
            are_held=any(parts.model.layers[name].holds for name in parts.layers),
        )

    def update(self, number: int, loss: Scalar) -> Updated:
        """Sum the gradients over the replicas, and step; returns the results on this rank."""
        with self._parts.comm.waiting("the sum of gradients", by_all=False):
            comm_seconds = self._store.wait()
        purity, kind = self._parts.purity, self._parts.passes.dtype
        fault = self._parts.gradient.unequal_copies(kind.itemsize)  # all tensor ranks compare
        purity.fault = purity.fault or fault
        self.weights.before_update()
        squares = self._parts.gradient.own_squares()
        own = loss if self._parts.grid.place.tensor == 0 else 0.0
        names = frozenset(tensor.name for tensor in self._parts.arena.tensors)
        self._unused.append(names - self._store.used)
        updater = self._parts.updater
        step = self._first + number // updater.per_step
        updater.step(self._parts.rates.common(step), step_index=step)
        self._store.reset()
        # An update takes so many times the gradient that was summed, and is one of so many.
        squares = squares * updater.per_step
        return Updated(own, squares, comm_seconds, len(self._unused[-1]))

    def read(self, own: Sequence[Updated]) -> list[Updated]:
        """The results with numbers of the host."""
        read = self._parts.device.read([one for each in own for one in (each.loss, each.squares)])
        numbers = zip(own, read[::2], read[1::2], strict=True)
        return [each._replace(loss=a, squares=b) for each, a, b in numbers]

    def agree(self, own: Sequence[Updated], more: Array) -> list[Updated]:
        """Sums of the results of each step's updates over the ranks; collective.

        ``more`` is summed in place, by the same message.
        """
        totals = np.array(own)
        each_step = -1, self._parts.updater.per_step, totals.shape[1]
        values = np.append(totals.reshape(each_step).sum(axis=1), more)
        self._parts.gradient.total(values, self._parts.comm)
        totals, more[...] = np.split(values, [values.size - more.size])
        return [Updated(*total) for total in totals.reshape(-1, len(Updated._fields)).tolist()]

    def expect_used(self) -> None:
        """Raise if no replica of a stage has used a tensor in a step; empty ones use none."""
        of_steps = zip(*[iter(self._unused)] * self._parts.updater.per_step, strict=True)
        own = [frozenset.intersection(*updates) for updates in of_steps]
        told = self._parts.comm.allgather((self._parts.grid.place.stage, own))
        stages = [[steps for s, steps in told if s == stage] for stage in {s for s, _ in told}]
        by_none = [frozenset.intersection(*step) for own in stages for step in zip(*own)]
        if names := sorted(frozenset[str]().union(*by_none)):
            raise ConfigError(
                f"parallel.schedule: asynchronous moves every parameter in every step, and the "
                f"loss does not follow from {', '.join(names[:3])}; freeze what is not used "
                "(requires_grad_(False)), or set schedule = '1f1b'"
            )

    def _along_velocity(self) -> Array:
        like = self._store.parameters
        motion = array_namespace(like).empty_like(like)
        updater = self._parts.updater
        step = self._first + self.weights.version // updater.per_step
        lr = self._parts.rates.rate(step) / updater.per_step
        for piece, state in zip(self._store.pieces, self._parts.updater.state, strict=True):
            motion[piece.start : piece.stop] = -lr * state["velocity"]
        return motion


class AsynchronousLoop(Loop):
    """Takes ``parallel.window`` steps at a time; the pipeline drains after the last of them.

    Each replica of a stage takes ``train.micro_batches`` micro-batches backward, then the stage
    updates: a stage of fewer replicas has more updates in a step.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.window = parts.config.parallel.window
        actions = parts.passes.runner().actions
        parts.updater.divide(sum(isinstance(action, Update) for action in actions))

    @np.errstate(over="ignore", invalid="ignore")
    def step(self, batch: Batch) -> list[Step]:
        """Train on the batches of a window, with one update for each.

        Errors are those of :meth:`Loop.step`, after the window; ConfigError also on all ranks: a
        parameter had no part in the loss.
        """
        parts = self.parts
        parts.expect_open()
        parts.before_step(parts)
        passes, done, count = parts.passes, parts.steps_done, len(batch.indices)
        runner = passes.runner(count)
        store = parts.store
        window = UpdateWindow(parts, runner)
        store.reset()
        assert batch.held is not None, "batches() has read them"
        source = passes.source(batch.held, batch.indices, parts.scale.value)
        count_labels(parts, source, None if getattr(parts.model.loss, "several", 0) else parts.comm)

        def context(micro_batch: int) -> nn.Context:
            step = done + micro_batch // passes.micro_batches
            return passes.context(step, source.indices(micro_batch), source.terms(micro_batch))

        with parts.passing():
            own = window.read(runner.run(source, window.weights, store, window.update, context))
        summing = sum(one.comm_seconds for one in own)
        report = parts.account.report(0.0, 0.0, summing, None, runner.waited)
        more = np.array([*report.numbers, *parts.device.read([source.unequal])], float)
        updates = window.agree(own, more)
        *numbers, unequal = more.tolist()
        whole = StepReport(*numbers)
        if whole.faults:
            parts.purity.expect(f"until step {done + count}")
        if unequal:
            raise uncountable(done, "parallel.schedule = 'asynchronous' updates each stage")
        if any(one.unused for one in updates):
            window.expect_used()
        parts.count_steps(done, batch.indices)
        parts.stopping, found = bool(whole.stopping), list[Step]()
        spent = whole.seconds, whole.wait_seconds, whole.read_seconds
        seconds, waited, reading = (total / count for total in spent)
        for step, update in enumerate(updates, done):
            if not (isfinite(update.loss) and isfinite(update.squares)):
                data = named(parts.comm, source.unfit(step - done))
                raise NonFinite(nonfinite_message(step + 1, "", data, also=""), found)
            samples = len(batch.indices[step - done])
            begun = Begun(step + 1, batch.epoch, samples, parts.rates.rate(step))
            times = seconds, update.comm_seconds, waited, reading
            norm = sqrt(update.squares)
            agreed = Agreed(
                update.loss, *times, sent_bytes=whole.sent_bytes / count,
                shared_bytes=whole.shared_bytes / count, memory=whole.memory, grad_norm=norm,
            )  # fmt: skip
            found.append(parts.account.record(begun, agreed))
        return found
