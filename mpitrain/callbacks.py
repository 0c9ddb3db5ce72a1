"""Tests, checkpoints and reports of a run, which are due between certain steps."""

import os
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import isfinite, nan
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives import provenance
from collectives.failure import aborts
from mpitrain import extras
from mpitrain.checkpoint.changes import origin_of
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.saving import checkpoints, resume, save
from mpitrain.checkpoint.writer import Writer
from mpitrain.config import ConfigError
from mpitrain.config.unread import as_read
from mpitrain.metrics import recorder
from mpitrain.metrics.records import Epoch, Record, Resumed, Saved, Start, Step, Summary, Write
from mpitrain.metrics.trace import remove_trace
from mpitrain.metrics.writer import ReportError
from mpitrain.ranks.lock import locked
from mpitrain.ranks.same import name_of
from mpitrain.ranks.stop import Stopped
from mpitrain.ranks.together import all_here, all_or_nobody, by_rank_0
from mpitrain.training.evaluation import evaluate
from mpitrain.training.loop import is_due
from mpitrain.training.parts import Asked, Parts
from mpitrain.update.agreement import Diverged, NonFinite


def ends_period(parts: Parts) -> bool:
    """Whether the last step was that before a test which a longer run would have there, too."""
    return not parts.seen and parts.epoch % parts.config.evaluate.every == 0


def is_test_due(parts: Parts) -> bool:
    """Whether a test is due after the step that was taken last."""
    is_last = bool(parts.ending) or parts.steps_done == parts.total_steps
    return parts.data.test is not None and (is_last or ends_period(parts))


def is_test_missing(parts: Parts) -> bool:
    """Whether the checkpoint that the run goes on from was written before its test."""
    return parts.watch.tested < parts.steps_done and is_test_due(parts)


class Callbacks:
    """A run in progress: its records, tests and checkpoints, and the search for stragglers.

    Attributes:
        tests: the tests, in turn.
    """

    def __init__(
        self,
        parts: Parts,
        report: Write,
        writer: Writer,
        resumed: Resumed | None,
        *,
        is_watched: bool,
    ) -> None:
        """Write the first records; collective.

        ``is_watched``: whether a rank has a function of the program that sees the records.
        """
        parts.asked = Asked(factor=parts.rates.factor)
        self._is_watched, self._has_told = is_watched, False
        if parts.measured_rates:
            parts.measured_rates.is_led = True
        self._parts, self._report, self._writer = parts, report, writer
        self.tests: list[Epoch] = []
        self._saved = resumed.step if resumed else None
        self._done = parts.steps_done
        parts.stopping = False  # a program may go on after it was stopped
        self._moved_before = parts.account.bytes_moved
        #: Sums over all steps.
        self._sums: defaultdict[str, float] = defaultdict(float)
        self.write(_start(parts))
        if resumed:
            self.write(resumed)
        parts.check_replicas("before the first step")
        if parts.spikes and not resumed:
            self._save()
        self._do_as_asked()

    def write(self, record: Record) -> None:
        """Report a record, and add a step to the sums."""
        if isinstance(record, Step):
            for name in ("samples", "seconds", "sent_bytes", "shared_bytes"):
                self._sums[name] += getattr(record, name)
            for name in ("comm_share", "wait_share", "read_share"):
                self._sums[name] += record.seconds * getattr(record, name)
            self._sums["steps"] += 1
        self._has_told = True
        self._report(record)
        if self._parts.spikes and isinstance(record, Step):
            self._parts.spikes.see(record)

    def go_back(self, error: Diverged) -> None:
        """Go back to the newest checkpoint after a spike, as ``run.on_spike`` says; collective.

        The error on all ranks: nobody goes back, or no more.
        """
        parts = self._parts
        if parts.spikes is None:
            raise error
        self._write_saved(self._writer.finish)
        back = parts.spikes.go_back(
            error,
            lambda step: resume(parts, allow_changes=True, before=step),
            damaged=CheckpointError,
        )
        self._writer.drop(back.step)
        self._saved, self._done, parts.asked.factor = None, back.step, parts.rates.factor
        left = parts.epoch - is_test_missing(parts)
        self.tests = [test for test in self.tests if test.epoch < left]
        self.write(back)
        self._complete()  # a run that is killed from now on leaves these batches out, too
        self._do_as_asked()

    def after_steps(self) -> None:
        """Do what is due after a step, or after several that were taken together; collective.

        A rank that is much slower than its peers is searched for every ``run.log_every`` steps;
        where ranks agree on several steps at once, the loop does so by the same message.
        """
        parts, before, done = self._parts, self._done, self._parts.steps_done
        self._done = done
        if is_due(parts.config.run.log_every, before, done) and parts.config.sync.agree == 1:
            spent = parts.comm.allreduce(parts.account.spent)
            if slow := parts.account.straggler(done, spent):
                self.write(slow)
        if done % parts.config.sync.agree == 0:  # a message to all while files are written
            self._write_saved(self._writer.poll)
        self._do_as_asked()
        if is_due(parts.config.checkpoint.every, before, done) and not parts.stopping:
            self._save()

    def test(self) -> None:
        """Test, and save the weights if they are the best; collective.

        NonFinite on all ranks: the test loss is not finite.
        """
        parts = self._parts
        found = self._evaluate()
        self.tests.append(found)
        self.write(found)
        if not isfinite(found.test_loss):
            raise NonFinite(
                f"the test loss is not finite after step {parts.steps_done}: the last update "
                "spoiled the parameters, or samples to test on hold numbers that are not finite; "
                "train --resume goes on from the newest checkpoint, with a smaller optim.lr or "
                "other samples",
                step=parts.steps_done,
            )
        is_regular = ends_period(parts)
        parts.watch.note(found, parts.steps_done, counts=is_regular)
        if parts.measured_rates and is_regular:
            parts.measured_rates.note(found, parts.steps_done)
        self._do_as_asked()
        if parts.watch.is_best():
            self._save(best=True)

    def ended(self) -> str:
        """The reason for which training ends before its last step; empty: it goes on."""
        return self._parts.ending or self._parts.watch.ended()

    def stop(self) -> None:
        """Save the last step, and raise Stopped on all ranks; collective."""
        parts = self._parts
        self._complete()
        self.write(parts.account.times(parts.grid.place))
        why = next(filter(None, parts.comm.allgather(parts.stop.reason)), "no reason")
        inside = ", within a spike of the loss, whose steps come again"
        raise Stopped(
            f"stopped after step {parts.steps_done} of {parts.total_steps} ({why})"
            + inside * bool(parts.spikes and parts.spikes.streak)
        )

    def finish(self) -> Summary:
        """Save the last step, give all replicas the same weights, and sum up; collective."""
        parts, tested = self._parts, self.tests[-1] if self.tests else None
        self._complete()
        if tested is None and parts.data.test is not None:
            tested = self._evaluate()
        parts.drain()
        self.write(parts.account.times(parts.grid.place))
        summary = self._summary(tested)
        self.write(summary)
        return summary

    def _do_as_asked(self) -> None:
        """Do what the program asked for at the last records; ConfigError if ranks differ."""
        if not (self._is_watched and self._has_told):
            return
        parts, self._has_told = self._parts, False
        asked = parts.asked
        asked.agree(parts.comm)
        parts.ending, parts.rates.factor = asked.end, asked.factor
        if asked.save and self._saved != parts.steps_done:
            self._save()
        asked.save = False

    def _evaluate(self) -> Epoch:
        parts = self._parts
        return evaluate(parts, parts.epoch - (not parts.seen))

    def _save(self, *, best: bool = False) -> None:
        """Begin to write a checkpoint, but in a spike that may still end; collective."""
        parts = self._parts
        is_last = parts.steps_done == parts.total_steps or self.ended()
        if best or is_last or not (parts.spikes and parts.spikes.streak):
            if parts.strategy:
                parts.strategy.quiesce()  # the bytes of exchanges are the steps'
            self._write_saved(lambda: save(parts, self._writer, best=best))
            if not best:
                self._saved = parts.steps_done

    def _complete(self) -> None:
        """Save the last step unless that was done, and wait for all files; collective."""
        if self._saved != self._parts.steps_done:
            self._save()
        self._write_saved(self._writer.finish)

    def _write_saved(self, act: Callable[[], tuple[Path, float] | None]) -> None:
        """Do what belongs to checkpoints, and to no step, and write of one that is complete."""
        with self._parts.account.apart():
            saved = act()
        if saved:
            folder, seconds = saved
            self.write(Saved(int(folder.name.rpartition("-")[2]), str(folder), seconds))
            self._sums["saved"] += 1
            self._sums["saving"] += seconds

    def _summary(self, tested: Epoch | None) -> Summary:
        """The record at the end of a run; collective.  ``tested``: its last test."""
        parts, sums, size = self._parts, self._sums, self._parts.comm.size
        steps, seconds = max(1, sums["steps"]), sums["seconds"] or 1.0
        moved = parts.account.bytes_moved - self._moved_before
        summary = Summary(
            test_loss=tested.test_loss if tested else nan,
            tested=tested is not None,
            metrics=tested.metrics if tested else {},
            ranks=size,
            algorithm=parts.store.algorithm,
            reason=parts.store.reason,
            samples_per_s=sums["samples"] / seconds,
            comm_share=sums["comm_share"] / seconds,
            wait_share=sums["wait_share"] / seconds,
            read_share=sums["read_share"] / seconds,
            sent_bytes=sums["sent_bytes"] / steps,
            shared_bytes=sums["shared_bytes"] / steps,
            dense_bytes=parts.comm.allreduce(parts.dense_bytes) / size,
            busiest_bytes=parts.comm.allreduce(moved, op=MPI.MAX) / steps,
            ended=self.ended() or f"all {parts.total_steps} steps are done",
            step_s=seconds / steps,
            save_s=sums["saving"] / max(1, sums["saved"]),
            mtbf=parts.config.checkpoint.mtbf,
        )
        return parts.comm.bcast(summary)


@contextmanager
def running(
    parts: Parts, go_on: bool, allow_changes: bool, on_record: Write | None, resume_hint: str
) -> Iterator[Callbacks]:
    """Lock the run's folder, restore its newest checkpoint, open its reports; collective.

    Arguments and errors are those of :func:`mpitrain.train`.
    """
    parts.expect_open()
    parts.ending = ""
    comm, config = parts.comm, parts.config
    if config.run.mfu and not parts.data.tokens:
        raise ConfigError("run.mfu needs samples that are lines of tokens of one length")
    if config.run.records:
        by_rank_0(comm, lambda: extras.expect_sinks(config.run.records), ConfigError)
    folder = Path(config.run.dir)
    with locked(comm, folder):
        origin_of(parts)  # before any step: those that follow from parameters move in them
        writer = Writer(
            comm,
            checkpoints(config),
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
            device=parts.device,
        )
        writer.prepare()
        resumed = resume(parts, allow_changes=allow_changes) if go_on else None
        if resumed:
            writer.go_on(resumed.step)
        else:
            writer.set_aside()
            by_rank_0(comm, lambda: remove_trace(folder), ConfigError)
        is_watched = comm.allreduce(on_record is not None, op=MPI.LOR)
        with _ended_together(parts, writer, resume_hint), _reports(parts, on_record) as report:
            try:
                yield Callbacks(parts, report, writer, resumed, is_watched=is_watched)
            except KeyboardInterrupt as error:
                if resume_hint:
                    error.add_note(f"{resume_hint} goes on from what is in {checkpoints(config)}")
                raise


@contextmanager
def _ended_together(parts: Parts, writer: Writer, resume_hint: str) -> Iterator[None]:
    """After an error on all ranks, complete the checkpoint that is being written."""
    own = os.getpid()
    try:
        with all_or_nobody(parts.comm, alone=ReportError):
            yield
    except MPI.Exception:
        writer.abandon()
        raise
    except Stopped as stopped:
        if resume_hint and parts.comm.rank == 0:
            print(f"mpitrain: {stopped}; {resume_hint} goes on from there", file=sys.stderr)
        raise
    except Exception as error:
        # The checkpoint that is being written holds a step before the error.  A child that the
        # program has forked is no rank, and no error of one rank gets here while aborts() is true.
        try:
            if os.getpid() == own and (aborts() or all_here(parts.comm)):
                writer.finish()
        except CheckpointError as another:
            error.add_note(str(another))
        raise


@contextmanager
def _reports(parts: Parts, on_record: Write | None) -> Iterator[Write]:
    """Open the reports on rank 0; yields a function that takes records for them and the caller."""
    steps, done, again = parts.total_steps, parts.steps_done, is_test_missing(parts)
    reports = recorder(parts.config, steps, done, tests_again=again, keys=_keys(parts))
    with reports if parts.comm.rank == 0 else nullcontext() as report:

        def write(record: Record) -> None:
            if on_record:
                parts.asked.seen = record
                try:
                    on_record(record)
                finally:
                    parts.asked.seen = None
            if report:
                report(record)

        yield write


def _keys(parts: Parts) -> dict[str, dict[str, Any]]:
    """The job's keys by table, with what the program brings."""
    own = parts.objects
    data = own.data and own.data.train
    brought = {"model": own.layers, "data": getattr(data, "data", data)}
    brought |= {"loss": own.loss, "optimizer": own.optimizer}
    kinds = {f"own.{key}": name_of(one) for key, one in brought.items() if one is not None}
    return as_read(parts.config, kinds)


def _start(parts: Parts) -> Start:
    """The record at the start of a run; collective."""
    software = provenance()
    start = Start(
        ranks=parts.comm.size,
        processes=parts.comm.allgather(f"{socket.gethostname()}:{os.getpid()}"),
        layout=parts.layout,
        stages=[list(names) for names in parts.partition.layers],
        algorithm=parts.store.algorithm,
        reason=parts.store.reason,
        parameters=parts.model.size,
        config=_keys(parts),
        date=software.pop("date"),
        software=software,
        devices=parts.comm.allgather(parts.device.name),
        tokens=parts.data.tokens,
        peak=parts.device.peak(parts.comm, parts.passes.dtype) if parts.config.run.mfu else 0.0,
    )
    return parts.comm.bcast(start)
