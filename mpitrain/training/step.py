"""The step of synchronous training."""

from collections.abc import Mapping, Sequence

import numpy as np

from collectives import Communicator
from mpitrain.arrays import Array, Scalar
from mpitrain.metrics.records import Record, Skipped
from mpitrain.training.account import Begun
from mpitrain.training.batches import MicroBatches
from mpitrain.training.loop import Batch, Loop, compute_gradient, read_batches
from mpitrain.update.agreement import Agreed, NonFinite, StepReport, named, nonfinite_message


class SynchronousLoop(Loop):
    """Updates the parameters once a step, by the gradient of the global batch.

    Every layout computes the same global mean loss and gradient as one process, up to rounding.
    Values that several ranks hold stay equal bit by bit.

    Until :meth:`update`, gradients are times the loss scale, and divided by all labels of the
    batch; ``Agreed.mean_factor`` makes them a mean over the labels that count.

    Attributes:
        workers: number of workers; a worker is all stages, shards and replicas of one gradient,
            here all ranks.
    """

    workers = 1

    @property
    def sharers(self) -> Communicator:
        """The ranks that share the gradient of the next step."""
        return self.parts.gradient.ranks

    @np.errstate(over="ignore", invalid="ignore")  # agree() tells all ranks what is not finite
    def step(self, batch: Batch) -> Sequence[Record]:
        """Train on a batch: one update.

        Raises:
            NonFinite: on all ranks: a loss or gradient is not finite, and the step cannot be
                skipped; the parameters are those before this step.
            Exception: as :meth:`Loop.step`.
        """
        parts, done = self.parts, self.parts.steps_done  # done: this step's number, from 0
        parts.expect_open()
        parts.before_step(parts)  # the program's own function, which may do nothing
        (samples,) = batch.indices  # of all ranks; a batch of this loop is one step
        shown_rate, scale = parts.rates.rate(done), parts.scale.value
        begun = Begun(done + 1, batch.epoch, len(samples), shown_rate, scale)
        state_before = {name: values.copy() for name, values in parts.state.items()}  # batch norm's
        micro_batches = self._micro_batches(batch)
        parts.store.reset()  # the gradients
        parts.summation.begin(done, scale)  # codecs draw by the step, and know the scale
        # It sums buckets over the ranks while the backward pass runs, and waits for the last sum.
        computed = compute_gradient(parts, parts.passes, done, micro_batches, self.sharers)
        sum_seconds = computed.sum_seconds + self.adjust_gradient()
        squares = parts.gradient.own_squares()
        report = parts.account.report(
            computed.loss, squares, sum_seconds, micro_batches, computed.waits
        )
        agreed = self.agree(report)
        skipped = None
        if agreed.finite:
            self.update(agreed)
        else:
            skipped = self.roll_back(agreed, computed.loss, micro_batches, state_before)
        self.exchange()
        parts.passes.forget_rounded()  # 16-bit copies of the parameters
        parts.count_steps(done, batch.indices)
        return [skipped] if skipped else self.record(begun, report, agreed)

    def adjust_gradient(self) -> float:
        """Change the summed gradient, in a subclass; returns seconds of messages; collective."""
        return 0.0

    def agree(self, report: StepReport) -> Agreed:
        """Sum the ranks' reports on a step; collective.

        Raises:
            ConfigError: on all ranks: a check of the program's code failed on one.
        """
        parts = self.parts
        agreed = parts.gradient.agree(report)
        if agreed.faults:  # a layer was no pure function: all ranks raise what one has found
            parts.purity.expect(f"step {parts.steps_done + 1}")
        parts.stopping = bool(agreed.stopping)
        return agreed

    def update(self, agreed: Agreed) -> None:
        """Update this rank's pieces by the clipped, unscaled gradient, and publish them to the
        ranks that need them; collective."""
        parts, done, scale = self.parts, self.parts.steps_done, self.parts.scale.value
        # Codecs keep their error for the next step, or raise on all ranks if the factor is not 1.
        parts.summation.commit(agreed.mean_factor)
        # The norm of the worker's whole gradient has mean_factor already.
        limit, norm = parts.config.optim.clip_norm, agreed.worker_norm / scale
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0  # as torch's clip_grad_norm_
        with parts.span("update", "update"):
            factor = clip / scale * agreed.mean_factor
            rate = parts.rates.common(done)  # each group multiplies it; records show group 0's
            parts.updater.step(rate, factor, step_index=done, unused=agreed.unused)
        with parts.account.late("publish"):  # the next step's report has these seconds
            parts.store.publish()
        parts.scale.went_well()

    def roll_back(
        self, agreed: Agreed, loss: Scalar, micro_batches: MicroBatches, state: Mapping[str, Array]
    ) -> Skipped | None:
        """Change no parameter, restore the layers' ``state``, and halve the loss scale, to 1 at
        least; collective over all ranks.

        Returns:
            The record; None, in a subclass whose worker skips alone: :meth:`record` tells the
            others later.

        Raises:
            NonFinite: on all ranks: no smaller scale can help, and ``run.on_nonfinite`` is "stop".
        """
        parts, number, scale = self.parts, self.parts.steps_done + 1, self.parts.scale
        parts.summation.rollback()
        for name, values in state.items():
            parts.state[name][...] = values
        unfit = micro_batches.unfit(nothing_counts=agreed.nothing_counts)
        culprits, samples = parts.gradient.culprits(loss), named(parts.comm, unfit)
        # Try a smaller scale even if samples are not finite: the program's loss may ignore them.
        # Where no label counts, the mean is 0/0 at any scale.
        smaller_helps = scale.value > 1.0 and not agreed.nothing_counts
        if parts.config.run.on_nonfinite == "stop" and not smaller_helps:
            raise NonFinite(nonfinite_message(number, culprits, samples), step=number)
        scale.overflowed()
        return Skipped(number, samples or culprits, scale.value, parts.account.synced(number))

    def exchange(self) -> None:
        """Exchange weights after a step or a skip, in a subclass; collective."""

    def record(self, begun: Begun, report: StepReport, agreed: Agreed) -> Sequence[Record]:
        """Records of the steps that all ranks know now; collective after the last step.

        ``report`` is this rank's own, for a subclass whose workers tell each other later.
        """
        parts = self.parts
        if parts.steps_done == parts.total_steps:  # no next step reports what came late
            agreed = agreed.plus(parts.account.take_late().summed(parts.comm))
        return [parts.account.record(begun, agreed)]

    def _micro_batches(self, batch: Batch) -> MicroBatches:
        """The micro-batches of a batch; reads it if the loop has not, as for a federated client."""
        parts = self.parts
        if batch.held is None:
            (batch,) = read_batches(parts, batch.epoch, iter(batch.indices))
        assert batch.held is not None
        # Passes divide by the whole batch: times workers, it is a mean over a worker's samples.
        return parts.passes.source(batch.held, batch.indices, parts.scale.value * self.workers)
