"""The step of synchronous training."""

from collections.abc import Mapping, Sequence

import numpy as np

from collectives import Communicator
from mpitrain.arrays import Array, Scalar
from mpitrain.metrics.records import Record, Skipped
from mpitrain.step.agreement import NOTHING_COUNTS, Agreed, NonFinite, StepReport, named, nonfinite
from mpitrain.training.account import Taken
from mpitrain.training.batches import MicroBatches
from mpitrain.training.loop import Batch, Loop, forward_backward, read_batches


class SynchronousLoop(Loop):
    """Updates the parameters once a step, by the gradient of the global batch.

    Every layout computes the same global mean loss and gradient as one process, up to rounding.
    Values that several ranks hold stay equal bit by bit.

    Attributes:
        gradients: number of gradients in a step, each a mean over its worker's samples alone.
    """

    gradients = 1

    @property
    def sharers(self) -> Communicator:
        """The ranks that share the gradient of the next step."""
        return self.parts.gradient.ranks

    @np.errstate(over="ignore", invalid="ignore")  # a loss that is not finite tells of both
    def step(self, batch: Batch) -> Sequence[Record]:
        """Train on a batch: one update.

        Raises:
            NonFinite: on all ranks: a loss or gradient is not finite; the parameters are those
                before this step.
            Exception: as :meth:`Loop.step`.
        """
        parts, done = self.parts, self.parts.steps_done
        parts.expect_open()
        parts.before_step(parts)
        (indices,), rate, scale = batch.indices, parts.rates.rate(done), parts.scale.value
        taken = Taken(done + 1, batch.epoch, len(indices), rate, scale)
        state = {name: values.copy() for name, values in parts.state.items()}  # running means
        source = self._micro_batches(batch)
        parts.store.reset()
        parts.summation.begin(done, scale)
        loss, comm_seconds = forward_backward(parts, parts.passes, done, source, self.sharers)
        report = parts.account.report(loss, comm_seconds, source)
        agreed = self.agree(report)
        parts.account.agreed()
        if agreed.finite:
            skipped, seconds = None, self._update(agreed)
        else:
            skipped, seconds = self.roll_back(agreed, loss, source, state), 0.0
        parts.passes.forget()
        seconds += self.exchange()
        parts.account.ended(seconds)
        parts.count(done, batch.indices)
        return [skipped] if skipped else self.record(taken, report, agreed)

    def agree(self, report: StepReport) -> Agreed:
        """Share this rank's report of a step with all ranks, and whether to stop; collective.

        Raises:
            ConfigError: on all ranks: a check of the program's code failed on one.
        """
        parts = self.parts
        agreed = parts.gradient.agree(report)
        if agreed.faulty:
            parts.purity.expect(f"step {parts.steps_done + 1}")
        parts.stopping = bool(agreed.stopping)
        return agreed

    def roll_back(
        self, agreed: Agreed, loss: Scalar, source: MicroBatches, state: Mapping[str, Array]
    ) -> Skipped | None:
        """Change no parameter, restore the layers' ``state``, lower the loss scale; collective.

        Returns:
            The record; None: :meth:`agree` learns of it in a later step.

        Raises:
            NonFinite: on all ranks: no smaller scale can help.
        """
        parts, number, scale = self.parts, self.parts.steps_done + 1, self.parts.scale
        parts.summation.rollback()
        for name, values in state.items():
            parts.state[name][...] = values
        unfit = source.unfit() or NOTHING_COUNTS * agreed.nothing_counts
        culprits, data = parts.gradient.culprits(loss), named(parts.comm, unfit)
        # Try a smaller scale even if samples are not finite: the program's loss may ignore them.
        may_help = scale.value > 1.0 and not agreed.nothing_counts
        if parts.config.run.on_nonfinite == "stop" and not may_help:
            raise NonFinite(nonfinite(number, culprits, data), step=number)
        scale.overflowed()
        return Skipped(number, data or culprits, scale.value, parts.account.synced(number))

    def exchange(self) -> float:
        """Exchange what is due after a step, taken or skipped; returns seconds; collective."""
        return 0.0

    def record(self, taken: Taken, report: StepReport, agreed: Agreed) -> Sequence[Record]:
        """Records of the steps that all ranks know now; collective after the last step."""
        parts = self.parts
        if parts.steps_done == parts.total_steps:  # no later report has these numbers
            late = parts.comm.allreduce(np.array(parts.account.last().numbers))
            agreed = agreed.plus(StepReport(*late.tolist()))
        return [parts.account.record(taken, agreed)]

    def _micro_batches(self, batch: Batch) -> MicroBatches:
        """The micro-batches of a batch; reads it if its loop has not read ahead."""
        parts = self.parts
        if batch.held is None:
            (batch,) = read_batches(parts, batch.epoch, iter(batch.indices))
        assert batch.held is not None
        return parts.passes.source(batch.held, batch.indices, parts.scale.value * self.gradients)

    def _update(self, agreed: Agreed) -> float:
        """Update this rank's pieces by the clipped, unscaled gradient; returns seconds of
        publishing them."""
        parts, done, scale = self.parts, self.parts.steps_done, self.parts.scale.value
        parts.summation.commit(agreed.factor)
        limit, norm = parts.config.optim.clip_norm, agreed.own_norm / scale
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0  # as torch's clip_grad_norm_
        with parts.span("update", "update"):
            factor = clip / scale * agreed.factor  # by what counts in the loss
            parts.updater.step(parts.rates.common(done), factor, done, agreed.unused)
        with parts.span("publish", "communicate"):
            seconds = parts.store.publish()
        parts.scale.went_well()
        return seconds
