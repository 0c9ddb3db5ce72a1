"""The step of synchronous training."""

from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

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

    Attributes:
        workers: number of workers; a worker is the ranks that share a gradient, here all.
    """

    workers = 1

    @property
    def sharers(self) -> Communicator:
        """The ranks that share the gradient of a step."""
        return self.parts.gradient.ranks

    @np.errstate(over="ignore", invalid="ignore")  # agree() tells all ranks what is not finite
    def step(self, batch: Batch) -> Sequence[Record]:
        """Train on a batch: one update.

        Raises:
            NonFinite: on all ranks: a loss or gradient is not finite, and the step cannot be
                skipped; the parameters are those before this step.
            Exception: as :meth:`Loop.step`.
        """
        parts, done = self.parts, self.parts.steps_done
        parts.expect_open()
        parts.before_step(parts)
        (samples,) = batch.indices  # a batch is one step here, with indices of all ranks' samples
        rate, scale = parts.rates.rate(done), parts.scale.value
        begun = Begun(done + 1, batch.epoch, len(samples), rate, scale)
        state_before = {name: values.copy() for name, values in parts.state.items()}  # batch norm's
        micro_batches = self._micro_batches(batch)
        parts.store.reset()
        parts.summation.begin(done, scale)
        # Buckets are summed over the ranks beside the backward pass, and are complete afterwards.
        loss, sum_seconds = compute_gradient(parts, parts.passes, done, micro_batches, self.sharers)
        sum_seconds += self.complete_gradient()
        squares, waited = parts.gradient.own_squares(), parts.passes.runner().waited
        report = parts.account.report(loss, squares, sum_seconds, micro_batches, waited)
        agreed = self.agree(report)
        skipped, late_seconds = None, 0.0
        if agreed.finite:
            # Each tensor rank has a gradient of its own for what all of them have whole.
            parts.gradient.expect_copies(parts.passes.dtype.itemsize)
            late_seconds = self.update(agreed)
        else:
            skipped = self.roll_back(agreed, loss, micro_batches, state_before)
        late_seconds += self.exchange()
        parts.passes.forget_rounded()  # copies of the parameters in 16 bits
        parts.account.note_late(late_seconds)
        # From here on steps_done counts this step; record() asks whether it was the last one.
        parts.count_steps(done, batch.indices)
        return [skipped] if skipped else self.record(begun, report, agreed)

    def complete_gradient(self) -> float:
        """Change the summed gradient, in a subclass; returns seconds of messages; collective."""
        return 0.0

    def agree(self, report: StepReport) -> Agreed:
        """Sum the ranks' reports on a step; collective.

        Raises:
            ConfigError: on all ranks: a check of the program's code failed on one.
        """
        parts = self.parts
        agreed = parts.gradient.agree(report)
        if agreed.faults:
            parts.purity.expect(f"step {parts.steps_done + 1}")  # raises what a layer has found
        parts.stopping = bool(agreed.stopping)
        return agreed

    def update(self, agreed: Agreed) -> float:
        """Update this rank's pieces by the clipped, unscaled gradient.  Returns the seconds of
        publishing them to the ranks that need them; collective."""
        parts, done, scale = self.parts, self.parts.steps_done, self.parts.scale.value
        # First, as it may refuse the factor: keep what a codec has left out of the sums.
        parts.summation.commit(agreed.factor)
        limit, norm = parts.config.optim.clip_norm, agreed.own_norm / scale  # with the factor
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0  # as torch's clip_grad_norm_
        with parts.span("update", "update"):
            # agreed.factor divides by counted labels where the passes did not.
            factor = clip / scale * agreed.factor
            rate = parts.rates.common(done)  # each group scales it; step() records group 0's
            parts.updater.step(rate, factor, step_index=done, unused=agreed.unused)
        with parts.span("publish", "communicate"):
            seconds = parts.store.publish()
        parts.scale.went_well()
        return seconds

    def roll_back(
        self, agreed: Agreed, loss: Scalar, micro_batches: MicroBatches, state: Mapping[str, Array]
    ) -> Skipped | None:
        """Change no parameter, restore the layers' ``state``, halve the loss scale; collective.

        Returns:
            The record; None, in a subclass: this worker alone skipped the step, and
            :meth:`record` keeps the record until all workers know.

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
        smaller_helps = scale.value > 1.0 and not agreed.nothing_counts
        if parts.config.run.on_nonfinite == "stop" and not smaller_helps:
            raise NonFinite(nonfinite_message(number, culprits, samples), step=number)
        scale.overflowed()
        return Skipped(number, samples or culprits, scale.value, parts.account.synced(number))

    def exchange(self) -> float:
        """Exchange weights after a step or a skip, in a subclass; returns seconds; collective."""
        return 0.0

    def record(self, begun: Begun, report: StepReport, agreed: Agreed) -> Sequence[Record]:
        """Records of the steps that all ranks know now; collective after the last step."""
        parts = self.parts
        if parts.steps_done == parts.total_steps:  # no later report has these numbers
            late = np.array(parts.account.take_late().numbers)  # seconds since agree()
            parts.comm.Allreduce(MPI.IN_PLACE, late, algorithm="native")  # these few numbers
            agreed = agreed.plus(StepReport(*late.tolist()))
        return [parts.account.record(begun, agreed)]

    def _micro_batches(self, batch: Batch) -> MicroBatches:
        """The micro-batches of a batch; reads it if that was not done, as for a client."""
        parts = self.parts
        if batch.held is None:
            (batch,) = read_batches(parts, batch.epoch, iter(batch.indices))
        assert batch.held is not None
        # Batch mean x workers = mean over a worker's samples.
        return parts.passes.source(batch.held, batch.indices, parts.scale.value * self.workers)
