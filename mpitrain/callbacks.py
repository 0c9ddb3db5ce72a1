"""Tests, checkpoints and reports of a run, which are due between certain steps."""

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite, nan
from pathlib import Path

import msgspec
from mpi4py import MPI

from collectives import provenance
from collectives.failure.abort import aborts
from mpitrain.checkpoint import CheckpointError, Writer
from mpitrain.checkpoint.recipe import recipe_of
from mpitrain.checkpoint.saving import checkpoints, resume, save
from mpitrain.config import ConfigError
from mpitrain.metrics import (
    Epoch,
    Record,
    ReportError,
    Resumed,
    Saved,
    Start,
    Step,
    Summary,
    Write,
    recorder,
    tensorboard,
)
from mpitrain.metrics.trace import remove_trace
from mpitrain.ranks.lock import locked
from mpitrain.ranks.stop import Stopped
from mpitrain.ranks.together import all_here, all_or_nobody, together
from mpitrain.step.agreement import NonFinite
from mpitrain.training.evaluation import evaluate
from mpitrain.training.parts import SHARED_ERRORS, Parts


class Checkpoints:
    """Writes checkpoints of the newest step and of the best test."""

    def __init__(self, parts: Parts, write: Write, writer: Writer, resumed: Resumed | None) -> None:
        """``resumed``: the checkpoint that the run goes on from."""
        self._parts, self._write, self._writer = parts, write, writer
        self._saved = resumed.step if resumed else None

    def is_due(self) -> bool:
        """Whether ``checkpoint.every`` asks for a checkpoint after this step."""
        every = self._parts.config.checkpoint.every
        return bool(every) and self._parts.steps_done % every == 0 and not self._parts.stopping

    def save(self, *, best: bool = False) -> None:
        """Begin to write a checkpoint; collective."""
        self._record(save(self._parts, self._writer, best=best))
        if not best:
            self._saved = self._parts.steps_done

    def poll(self) -> None:
        """Complete the checkpoint that is being written, if all its files are there; collective."""
        self._record(self._writer.poll())

    def finish(self) -> None:
        """Save the last step unless that was done, and wait for all files; collective."""
        if self._saved != self._parts.steps_done:
            self.save()
        self._record(self._writer.finish())

    def _record(self, saved: tuple[Path, float] | None) -> None:
        if saved:
            folder, seconds = saved
            self._write(Saved(int(folder.name.rpartition("-")[2]), str(folder), seconds))


class Tests:
    """Tests the model every ``evaluate.every`` epochs and after the last step.

    Attributes:
        last: the last test of this run, if there was one.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.last: Epoch | None = None

    def is_due(self) -> bool:
        """Whether a test is due after the step that was taken last."""
        parts = self._parts
        every = parts.sampler.steps_per_epoch * parts.config.evaluate.every
        is_last = parts.steps_done == parts.total_steps
        return parts.data.test is not None and (is_last or parts.steps_done % every == 0)

    def is_missing(self) -> bool:
        """Whether the checkpoint that the run goes on from was written before its test."""
        return self._parts.watch.tested < self._parts.steps_done and self.is_due()

    def evaluate(self) -> Epoch:
        """Test the model; collective."""
        parts = self._parts
        return evaluate(parts, (parts.steps_done - 1) // parts.sampler.steps_per_epoch)


class Stragglers:
    """Searches every ``run.log_every`` steps for a rank that keeps the others waiting."""

    def __init__(self, parts: Parts, write: Write) -> None:
        self._parts, self._write = parts, write
        self._looked = parts.steps_done

    def is_due(self) -> bool:
        """Whether the steps since the last search have passed a multiple of ``run.log_every``."""
        every = self._parts.config.run.log_every
        return self._parts.steps_done // every > self._looked // every

    def look(self) -> None:
        """Record the slowest rank, if it is much slower than its peers; collective."""
        self._looked = self._parts.steps_done
        if slow := self._parts.account.straggler(self._looked):
            self._write(slow)


class Totals:
    """Sums over all steps of a run."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add(self, step: Record) -> None:
        """Add a step; other records are ignored."""
        if isinstance(step, Step):
            for name in ("samples", "seconds", "sent_bytes", "shared_bytes"):
                self._sums[name] += getattr(step, name)
            for name in ("comm_share", "wait_share", "read_share"):
                self._sums[name] += step.seconds * getattr(step, name)
            self._sums["steps"] += 1

    def summary(self, parts: Parts, result: Epoch | None) -> Summary:
        """The record at the end of a run; ``result``: its last test."""
        sums, steps, seconds = self._sums, max(1, self._sums["steps"]), self._sums["seconds"] or 1.0
        return Summary(
            test_loss=result.test_loss if result else nan,
            tested=result is not None,
            metrics=result.metrics if result else {},
            ranks=parts.comm.size,
            algorithm=parts.store.algorithm,
            reason=parts.store.reason,
            samples_per_s=sums["samples"] / seconds,
            comm_share=sums["comm_share"] / seconds,
            wait_share=sums["wait_share"] / seconds,
            read_share=sums["read_share"] / seconds,
            sent_bytes=sums["sent_bytes"] / steps,
            shared_bytes=sums["shared_bytes"] / steps,
            dense_bytes=parts.dense_bytes,
            ended=parts.watch.ended() or f"all {parts.total_steps} steps are done",
        )


class Callbacks:
    """A run in progress: its records, tests and checkpoints.

    Attributes:
        write: takes each record, on all ranks.
        checkpoints, tests, stragglers: tasks between steps; each says when it is due.
    """

    def __init__(
        self, parts: Parts, tests: Tests, write: Write, writer: Writer, resumed: Resumed | None
    ) -> None:
        """Write the first records; collective."""
        self._parts, self._totals, self.tests = parts, Totals(), tests

        def record(one: Record) -> None:
            self._totals.add(one)
            write(one)

        self.write = record
        self.checkpoints = Checkpoints(parts, record, writer, resumed)
        self.stragglers = Stragglers(parts, record)
        record(_start(parts))
        if resumed:
            record(resumed)
        parts.check_replicas("before the first step")

    def test(self) -> None:
        """Test, and save the weights if they are the best; collective.

        Raises:
            NonFinite: on all ranks: the test loss is not finite.
        """
        parts = self._parts
        self.tests.last = found = self.tests.evaluate()
        self.write(found)
        if not isfinite(found.test_loss):
            raise NonFinite(
                f"the test loss is not finite after step {parts.steps_done}: the last update "
                "spoiled the parameters, or samples to test on hold numbers that are not finite; "
                "train --resume goes on from the newest checkpoint, with a smaller optim.lr or "
                "other samples"
            )
        parts.watch.tell(found, parts.steps_done)
        if parts.watch.is_best():
            self.checkpoints.save(best=True)

    def stop(self) -> None:
        """Save the last step; collective.

        Raises:
            Stopped: always, on all ranks.
        """
        parts = self._parts
        self.checkpoints.save()
        self.checkpoints.finish()
        self.write(parts.account.times(parts.grid.place))
        raise Stopped(
            f"stopped after step {parts.steps_done} of {parts.total_steps} ({parts.stop_reason()})"
        )

    def finish(self) -> Summary:
        """Save the last step, give all replicas the same weights, and sum up; collective."""
        parts, result = self._parts, self.tests.last
        self.checkpoints.finish()
        if result is None and parts.data.test is not None:
            result = self.tests.evaluate()
        parts.drain()
        self.write(parts.account.times(parts.grid.place))
        summary = self._totals.summary(parts, result)
        self.write(summary)
        return summary


@contextmanager
def running(
    parts: Parts, *, go_on: bool, allow_changes: bool, tell: Write | None, way: str
) -> Iterator[Callbacks]:
    """Lock the run's folder, restore its newest checkpoint, open its reports; collective.

    Args:
        parts: the job on this rank.
        go_on, allow_changes, tell, way: see :func:`mpitrain.train`, which also lists the errors.
    """
    parts.expect_open()
    comm, config = parts.comm, parts.config
    if config.run.tensorboard:
        tensorboard.check()
    folder = Path(config.run.dir)
    with locked(comm, folder):
        recipe_of(parts)  # before any step, which may change values in the program's own objects
        resumed = resume(parts, allow_changes=allow_changes) if go_on else None
        writer = Writer(
            comm,
            checkpoints(config),
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
            resumed=resumed.step if resumed else None,
            device=parts.device,
        )
        if not resumed:
            writer.set_aside()
            together(comm, lambda: remove_trace(folder) if comm.rank == 0 else None, ConfigError)
        tests = Tests(parts)
        with (
            _ended_together(parts, writer, way),
            _reports(parts, tell, tests_again=tests.is_missing()) as write,
        ):
            yield Callbacks(parts, tests, write, writer, resumed)


@contextmanager
def _ended_together(parts: Parts, writer: Writer, way: str) -> Iterator[None]:
    """After an error on all ranks, complete the checkpoint that is being written."""
    shared: tuple[type[Exception], ...] = (*SHARED_ERRORS, CheckpointError)
    try:
        with all_or_nobody(parts.comm, alone=ReportError):
            yield
    except MPI.Exception:
        writer.abandon()
        raise
    except Stopped as stopped:
        if way and parts.comm.rank == 0:
            print(f"mpitrain: {stopped}; {way} goes on from there", file=sys.stderr)
        raise
    except shared as error:
        # The checkpoint that is being written holds a step before the error.
        try:
            if aborts() or all_here(parts.comm):
                writer.finish()
        except CheckpointError as another:
            error.add_note(str(another))
        raise


@contextmanager
def _reports(parts: Parts, tell: Write | None, *, tests_again: bool) -> Iterator[Write]:
    """Open the reports on rank 0; yields a function that gives records to ``tell`` and reports."""
    if parts.comm.rank > 0:
        yield tell or (lambda record: None)
        return
    steps, done = parts.total_steps, parts.steps_done
    with recorder(parts.config, steps, done, tests_again=tests_again) as report:

        def write(record: Record) -> None:
            if tell:
                tell(record)
            report(record)

        yield write


def _start(parts: Parts) -> Start:
    software = provenance()
    return Start(
        ranks=parts.comm.size,
        processes=parts.comm.allgather(f"{socket.gethostname()}:{os.getpid()}"),
        layout=parts.layout,
        stages=[list(names) for names in parts.partition.layers],
        algorithm=parts.store.algorithm,
        reason=parts.store.reason,
        parameters=parts.model.size,
        config=msgspec.to_builtins(parts.config),
        date=software.pop("date"),
        software=software,
        devices=parts.comm.allgather(parts.device.name),
    )
