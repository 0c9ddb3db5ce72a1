"""A run of training: the loop over epochs, and the step of synchronous training."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import numpy as np
from mpi4py import MPI

from mpitrain.arrays import Array, Scalar
from mpitrain.callbacks import is_test_due, is_test_missing, running
from mpitrain.metrics.records import Epoch, Record, Skipped, Step, Summary, Write
from mpitrain.ranks.same import expect_same
from mpitrain.step.agreement import (
    NOTHING_COUNTS,
    Agreed,
    Ledger,
    LocalStep,
    NonFinite,
    StepReport,
    named,
    nonfinite,
)
from mpitrain.training.batches import MicroBatches
from mpitrain.training.compatibility import uncountable
from mpitrain.training.loop import Batch, Loop, forward_backward, is_due, read_batches
from mpitrain.training.parts import Parts


class Steps(Protocol):
    """A loop of a job, or an object such as :class:`mpitrain.Trainer` that has one."""

    @property
    def parts(self) -> Parts: ...

    def steps(self, epoch: int) -> Iterator[Sequence[Record]]: ...


def train(
    loop: Steps,
    *,
    go_on: bool = False,
    allow_changes: bool = False,
    on_record: Write | None = None,
    resume_hint: str = "mpitrain.train(trainer, go_on=True)",
) -> Summary:
    """Run all steps that are left; rank 0 reports to the console and to ``metrics.jsonl``.

    Collective.

    Args:
        loop: the loop of a job (:func:`mpitrain.start.start`), or an :class:`mpitrain.Trainer`.
        go_on: begin with the newest complete checkpoint in ``run.dir``, if there is one.
        allow_changes: accept the checkpoint of another job whose tensors have the same shapes.
        on_record: function that each rank calls with each record, which is the same on all ranks.
        resume_hint: command or call that goes on after :class:`Stopped`, for a line that rank 0
            prints; empty: no line.

    Raises:
        NonFinite: on all ranks: a loss or gradient is not finite.  No checkpoint holds such values.
            As after any error on all ranks, a checkpoint that was being written is completed first.
        mpitrain.parallel.replicas.ReplicaMismatch: on all ranks: replicas hold different values.
        mpitrain.checkpoint.manifest.CheckpointError: on all ranks: a checkpoint cannot be written.
        Stopped: on all ranks, after a checkpoint: a rank was asked to stop; exit status 75 if
            nobody catches it.
        ConfigError: on all ranks: ``run.dir`` cannot be written or belongs to another job, or a
            report cannot be written here.
        ReportError: on rank 0: it cannot write its report.
        MPI.Exception: another rank has died, with an MPI library that survives this.
        RuntimeError: the loop is closed.
        TypeError: on all ranks: an argument is of another kind.
    """
    expect_asked(loop.parts, {"go_on": go_on, "allow_changes": allow_changes}, on_record)
    return trained(loop, go_on, allow_changes, on_record, resume_hint)[0]


def expect_asked(parts: Parts, flags: Mapping[str, bool], on_record: Write | None) -> None:
    """Check what the ranks ask of a run; collective.

    Raises:
        RuntimeError: the loop is closed.
        ConfigError: on all ranks: their flags differ.
        TypeError: on all ranks: a flag is none, or ``on_record`` no function.
    """
    parts.expect_open()
    expect_same(parts.comm, flags)
    for name, flag in flags.items():
        if flag not in (True, False):
            raise TypeError(f"{name}: give True or False, not {flag!r}; dir= names the folder")
    if parts.comm.allreduce(on_record is not None and not callable(on_record), MPI.LOR):
        raise TypeError("on_record: give a function of a record, or leave it out")


def trained(
    loop: Steps, go_on: bool, allow_changes: bool, on_record: Write | None, resume_hint: str
) -> tuple[Summary, list[Epoch]]:
    """As :func:`train`, with the tests in turn."""
    parts = loop.parts
    with running(parts, go_on, allow_changes, on_record, resume_hint) as run:
        if is_test_missing(parts):
            run.test()
        while parts.steps_done < parts.total_steps and not run.ended():
            try:
                for records in loop.steps(parts.epoch):
                    for record in records:
                        run.write(record)
                    run.after_steps()
            except NonFinite as error:
                for record in error.before:
                    run.write(record)
                raise
            if parts.stopping:
                run.stop()
            if is_test_due(parts):
                run.test()
        parts.purity.expect(f"step {parts.steps_done}")  # what the last update has shown
        return run.finish(), run.tests


class SynchronousLoop(Loop):
    """Updates the parameters once a step, by the gradient of the global batch.

    Every layout computes the same global mean loss and gradient as one process, up to rounding.
    Values that several ranks hold stay equal bit by bit.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        sync = parts.config.sync
        #: Number of gradients.  Each is a mean over its worker's samples alone.
        self._workers = parts.grid.layout.replicas[0] if sync.drifts else 1
        #: Steps on which the ranks have not agreed yet; None: they agree in each step.
        self._ledger = Ledger(parts.comm, self._workers, sync.agree) if sync.agree > 1 else None

    @np.errstate(over="ignore", invalid="ignore")
    def step(self, batch: Batch) -> Sequence[Record]:
        """Train on a batch: one update.

        Returns:
            The record of the step.  With ``sync.agree``, the ranks agree only after several steps
            and at the end of an epoch: then the records of all these steps, and none before.

        Raises:
            NonFinite: on all ranks: a loss or gradient is not finite; the parameters are those
                before this step.  With ``sync.agree``, each worker has left out the steps that were
                not finite.
            Exception: as :meth:`Loop.step`.
        """
        parts, number = self.parts, self.parts.steps_done
        parts.expect_open()
        parts.before_step(parts)
        state_before = {name: values.copy() for name, values in parts.state.items()}
        parts.store.reset()
        parts.summation.begin(number, parts.scale.value)
        source = self._source(batch)
        loss, comm_seconds = forward_backward(parts, parts.passes, number, source)
        report = parts.account.report(loss, comm_seconds, source)
        agreed = parts.strategy.agree(number, parts.gradient, report)
        parts.account.agreed()
        if self._ledger is None:
            if agreed.faulty:
                parts.purity.expect(f"step {number + 1}")
            is_late = agreed.factor != 1 and not agreed.nothing_counts
            if is_late and parts.summation.acts_alone:
                raise uncountable(number, "parallel.zero = 2 or 3 with a codec sums gradients")
            parts.stopping = bool(agreed.stopping)
        if agreed.finite:
            self._descend(agreed)
            return self._finish(batch, report, agreed)
        unfit = source.unfit()
        if agreed.nothing_counts and not unfit:
            unfit = NOTHING_COUNTS
        if self._ledger is None:
            return [self._skip(batch, loss, unfit, state_before, agreed.nothing_counts)]
        # Only this worker skips its update, and goes on with its old weights; the other ranks learn
        # it when they next agree.
        culprits = ", ".join(parts.gradient.own_culprits(loss)[:3])
        return self._finish(batch, report, agreed, culprits or "the norm of its gradient", unfit)

    def _source(self, batch: Batch) -> MicroBatches:
        """The micro-batches of a batch; reads the batch if that was not done."""
        parts = self.parts
        if batch.held is None:
            (batch,) = read_batches(parts, batch.epoch, iter(batch.indices))
        assert batch.held is not None
        return parts.passes.source(batch.held, batch.indices, parts.scale.value * self._workers)

    def _descend(self, agreed: Agreed) -> None:
        """Update this rank's pieces of the parameters by the clipped, unscaled gradient."""
        parts, number = self.parts, self.parts.steps_done
        scale = parts.scale.value
        limit, norm = parts.config.optim.clip_norm, agreed.own_norm / scale
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0  # as torch's clip_grad_norm_
        with parts.span("update", "update"):
            unused = agreed.unused
            if parts.summation.acts_alone:  # a codec's residuals may arrive in later steps
                unused = parts.updater.never_used(unused)
            factor = clip / scale * agreed.factor
            parts.updater.step(parts.rates.common(number), factor, number, unused)

    def _exchange(self) -> float:
        """Synchronise with the other workers if that is due; returns seconds of communication."""
        parts = self.parts
        waiting = parts.comm.waiting("the mean of the workers' weights")
        with parts.span("exchange", "communicate"), waiting:
            began = perf_counter()
            parts.strategy.after_step(parts.steps_done)
            seconds = perf_counter() - began
        parts.passes.forget()
        return seconds

    def _finish(
        self, batch: Batch, report: StepReport, agreed: Agreed, failed: str = "", unfit: str = ""
    ) -> Sequence[Record]:
        """Publish the update, synchronise workers and count the step.

        Returns records of the steps on which the ranks have agreed.
        """
        parts, number, ledger = self.parts, self.parts.steps_done, self._ledger
        lr, scale = parts.rates.rate(number), parts.scale.value
        with parts.span("publish", "communicate"):
            published = parts.store.publish()
        parts.account.ended(published + self._exchange())
        parts.summation.commit()
        parts.scale.went_well()
        parts.count(number, batch.indices)
        is_last = parts.steps_done == parts.total_steps
        if is_last:
            last = parts.account.last()
            report = report.plus(last)
            if ledger is None:
                late = parts.comm.allreduce(np.array(last.numbers)).tolist()
                agreed = agreed.plus(StepReport(*late))
        own = LocalStep(
            step=number + 1,
            epoch=batch.epoch,
            samples=len(batch.indices[0]),
            lr=lr,
            report=report,
            squares=agreed.own_norm**2 * parts.grid.layout.replicas[0] / parts.comm.size,
            failed=failed,
            unfit=unfit,
        )
        if ledger is None:
            return [parts.account.record(own, agreed, agreed.grad_norm / scale)]
        mean = replace(report, loss=report.loss * agreed.factor)
        ledger.steps.append(replace(own, report=mean))
        meets = is_last or not parts.seen or parts.steps_done % ledger.every == 0
        return self._agree_late(ledger) if meets else []

    def _agree_late(self, ledger: Ledger) -> Sequence[Record]:
        """Records since the last agreement of the ranks, perhaps a straggler's; collective."""
        parts, began, faulty, found = self.parts, perf_counter(), False, list[Step]()
        parts.stopping = False
        spent = parts.account.spent.copy()
        try:
            for own, agreed in ledger.agree(spent):
                faulty |= bool(agreed.faulty)
                parts.stopping |= bool(agreed.stopping)
                found.append(parts.account.record(own, agreed, agreed.grad_norm))
        except NonFinite as error:
            error.before = found
            raise
        parts.account.met += perf_counter() - began
        if faulty:
            parts.purity.expect(f"until step {parts.steps_done}")
        before, done = parts.steps_done - len(found), parts.steps_done
        searches = is_due(parts.config.run.log_every, before, done)
        slow = parts.account.straggler(done, spent) if searches else None
        return [*found, slow] if slow else found

    def _skip(
        self, batch: Batch, loss: Scalar, unfit: str, state: Mapping[str, Array], hopeless: bool
    ) -> Skipped:
        """Take a step that changes no parameter, and lower the loss scale; collective.

        ``hopeless``: no smaller scale can help.  NonFinite: the job stops there.
        """
        parts, number = self.parts, self.parts.steps_done + 1
        parts.summation.rollback()
        for name, values in state.items():
            parts.state[name][...] = values
        culprits, data = parts.gradient.culprits(loss), named(parts.comm, unfit)
        # Try a smaller scale even if samples are not finite: the program's loss may ignore them.
        scaled = parts.scale.enabled and parts.scale.value > 1.0 and not hopeless
        if parts.config.run.on_nonfinite == "stop" and not scaled:
            raise NonFinite(nonfinite(number, culprits, data))
        parts.scale.overflowed()
        parts.account.ended(self._exchange())
        parts.count(number - 1, batch.indices)
        synced = parts.account.synced(number)
        return Skipped(number, data or culprits, parts.scale.value, synced)
