"""A run of training: steps, checkpoints and reports until it ends or is asked to stop."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import isfinite, nan
from pathlib import Path

import msgspec
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator, provenance
from collectives.failure.abort import aborts
from mpitrain.checkpoint import CheckpointError, Writer, newest
from mpitrain.checkpoint.recipe import kept_constants, recipe_of
from mpitrain.checkpoint.state import collect, restore
from mpitrain.config import Compress, Config, ConfigError
from mpitrain.metrics import (
    Epoch,
    Record,
    ReportError,
    Resumed,
    Round,
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
from mpitrain.training.trainer import Trainer


def train(
    trainer: Trainer,
    *,
    go_on: bool = False,
    allow_changes: bool = False,
    tell: Write | None = None,
    way: str = "mpitrain.train(trainer, go_on=True)",
) -> Summary:
    """Run all steps that are left; rank 0 reports to the console and to ``metrics.jsonl``.

    Collective.

    Args:
        trainer: of the job.
        go_on: from the newest checkpoint in ``run.dir`` that is whole, if there is one.
        allow_changes: go on with another job, too, as far as the checkpoint fits it.
        tell: is called with each record, on all ranks.
        way: how the caller goes on after :class:`Stopped`, which rank 0 writes; nothing if empty.

    Raises:
        NonFinite: on all ranks, before anything that is not finite goes into a checkpoint; one that
            was being written is complete then, as after other errors of all ranks.
        mpitrain.parallel.replicas.ReplicaMismatch: on all ranks.
        mpitrain.checkpoint.CheckpointError: on all ranks, when one cannot be written.
        Stopped: on all ranks, after a checkpoint, if a rank was asked to stop; exit status 75 where
            nobody catches it.
        ConfigError: on all ranks: ``run.dir`` cannot be written or is another job's, or a report
            cannot be written here.
        ReportError: on rank 0, when it cannot write its report.
        MPI.Exception: with MPIs that survive the death of a rank.
        RuntimeError: the trainer is closed.
    """
    trainer.expect_open()
    config = trainer.config
    if config.run.tensorboard:
        tensorboard.check()
    with locked(trainer.comm, Path(config.run.dir)):
        recipe_of(trainer)  # before steps, which may change what a program's own objects hold
        resumed = resume(trainer, allow_changes=allow_changes) if go_on else None
        writer = Writer(
            trainer.comm,
            checkpoints(config),
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
            resumed=resumed.step if resumed else None,
            device=trainer.device,
        )
        if not resumed:
            writer.set_aside()
            folder = Path(config.run.dir)
            together(
                trainer.comm,
                lambda: remove_trace(folder) if trainer.comm.rank == 0 else None,
                ConfigError,
            )
        shared: tuple[type[Exception], ...] = (*trainer.shared_errors, CheckpointError)
        try:
            with all_or_nobody(trainer.comm, alone=ReportError):
                return _to_the_end(trainer, writer, resumed, tell)
        except MPI.Exception:
            writer.abandon()
            raise
        except Stopped as stopped:
            if way and trainer.comm.rank == 0:
                print(f"mpitrain: {stopped}; {way} goes on from there", file=sys.stderr)
            raise
        except shared as error:
            # The checkpoint that is being written is of a step that went well.
            try:
                if aborts() or all_here(trainer.comm):
                    writer.finish()
            except CheckpointError as another:
                error.add_note(str(another))
            raise


def _to_the_end(
    trainer: Trainer, writer: Writer, resumed: Resumed | None, tell: Write | None
) -> Summary:
    """Epoch after epoch, with its records, checkpoints and tests."""
    config = trainer.config
    log_every = config.run.log_every
    totals = _Totals()
    result: Epoch | None = None
    per_epoch = trainer.sampler.steps_per_epoch
    with _recorder(trainer, tell) as write:
        write(_start(trainer))
        if resumed:
            write(resumed)
        trainer.check_replicas("before the first step")
        if _lacks_test(trainer):
            result = _test(trainer, writer, write)
        while trainer.steps_done < trainer.total_steps and not trainer.watch.ended():
            epoch = trainer.steps_done // per_epoch
            for record in trainer.run_epoch(epoch):
                write(record)
                if isinstance(record, Round):  # its step comes next
                    continue
                if isinstance(record, Step):
                    totals.add(record)
                if record.step < trainer.steps_done:
                    continue  # the records of several steps have come together
                slow = trainer.straggler() if trainer.steps_done % log_every == 0 else None
                if slow:
                    write(slow)
                if found := trainer.found_overlap():
                    write(found)
                _tell(write, writer.poll())
                every = config.checkpoint.every
                if every and trainer.steps_done % every == 0 and not trainer.stopping:
                    _tell(write, save(trainer, writer))
            if trainer.stopping:
                _tell(write, save(trainer, writer))
                _tell(write, writer.finish())
                write(trainer.times())
                raise Stopped(
                    f"stopped after step {trainer.steps_done} of {trainer.total_steps} "
                    f"({trainer.stop_reason()})"
                )
            if _is_due(trainer):
                result = _test(trainer, writer, write)
        if writer.last != trainer.steps_done and not (
            resumed and resumed.step == trainer.steps_done
        ):
            _tell(write, save(trainer, writer))
        _tell(write, writer.finish())
        if result is None and trainer.data.test is not None:
            result = evaluate(trainer, (trainer.steps_done - 1) // per_epoch)
        trainer.drain()
        write(trainer.times())
        summary = totals.summary(trainer, result)
        write(summary)
    return summary


def _is_due(trainer: Trainer) -> bool:
    """Whether a test follows the last step."""
    if trainer.data.test is None:
        return False
    every = trainer.sampler.steps_per_epoch * trainer.config.evaluate.every
    return trainer.steps_done == trainer.total_steps or trainer.steps_done % every == 0


def _lacks_test(trainer: Trainer) -> bool:
    """Whether the checkpoint that the run goes on from was written before the test after its step,
    which may have been made, or not."""
    return trainer.watch.tested < trainer.steps_done and _is_due(trainer)


def _test(trainer: Trainer, writer: Writer, write: Write) -> Epoch:
    """The test after the last step, and its checkpoint if it is the best."""
    result = evaluate(trainer, (trainer.steps_done - 1) // trainer.sampler.steps_per_epoch)
    write(result)
    if not isfinite(result.test_loss):
        raise NonFinite(
            f"the test loss is not finite after step {trainer.steps_done}: the last update "
            "spoiled the parameters, or samples to test on hold numbers that are not finite; train "
            "--resume goes on from the newest checkpoint, with a smaller optim.lr or other samples"
        )
    trainer.watch.tell(result, trainer.steps_done)
    if trainer.watch.is_best():
        _tell(write, save(trainer, writer, best=True))
    return result


def checkpoints(config: Config) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.run.dir) / "checkpoints"


def save(trainer: Trainer, writer: Writer, *, best: bool = False) -> tuple[Path, float] | None:
    """Begin a checkpoint, of the best test or of the newest step.

    Returns:
        The one before and the seconds it took, if it was not complete until now.
    """
    before = writer.finish()
    # What differs between replicas is wrong on one of them, and must not outlive the run.
    trainer.check_replicas(f"before the checkpoint after step {trainer.steps_done}")
    with trainer.span("checkpoint", "checkpoint"):
        arrays, pieces, manifest = collect(trainer)
        if manifest.constants:
            writer.keep_constants(manifest.constants, lambda: kept_constants(trainer))
        writer.begin(trainer.steps_done, arrays, pieces, manifest, best=best)
    return before


def settled(comm: Communicator, config: Config) -> Config:
    """A job that goes on, with the code that ``compress.codec = "auto"`` took at its beginning.

    What that has left out belongs to it, and another choice would be another run.  Collective.
    """
    if config.compress.codec != "auto":
        return config
    checkpoint, _ = newest(checkpoints(config), comm)
    if checkpoint is None:
        return config
    codec = checkpoint.job.compress.codec
    how = Compress() if codec == "none" else replace(config.compress, codec=codec)
    return replace(config, compress=how)


def resume(trainer: Trainer, *, allow_changes: bool = False) -> Resumed | None:
    """Take everything from the newest checkpoint in ``run.dir`` that is whole, if any.

    Collective.

    Args:
        trainer: takes it.
        allow_changes: of another job, too, as far as it fits.

    Raises:
        CheckpointError: on all ranks; it is another job's, or none of several can be used.
    """
    checkpoint, refused = newest(checkpoints(trainer.config), trainer.comm)
    if checkpoint is None:
        if refused:
            raise CheckpointError(f"no checkpoint can be used: {'; '.join(refused)}")
        return None
    recipe_of(trainer)
    notes = together(
        trainer.comm,
        lambda: restore(trainer, checkpoint, allow_changes=allow_changes),
        CheckpointError,
    )
    trainer.refresh()
    return Resumed(trainer.steps_done, str(checkpoint.folder), refused, notes)


class _Totals:
    """Over all steps of a run."""

    def __init__(self) -> None:
        self.samples = self.seconds = self.comm_seconds = self.waiting = self.reading = 0.0
        self.steps = 0
        self.sent_bytes = self.shared_bytes = 0.0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.sent_bytes += step.sent_bytes
        self.shared_bytes += step.shared_bytes
        self.samples += step.samples
        self.seconds += step.seconds
        self.comm_seconds += step.seconds * step.comm_share
        self.waiting += step.seconds * step.wait_share
        self.reading += step.seconds * step.read_share

    def summary(self, trainer: Trainer, result: Epoch | None) -> Summary:
        return Summary(
            test_loss=result.test_loss if result else nan,
            tested=result is not None,
            metrics=result.metrics if result else {},
            ranks=trainer.comm.size,
            algorithm=trainer.store.algorithm,
            reason=trainer.store.reason,
            samples_per_s=self.samples / self.seconds if self.seconds else 0.0,
            comm_share=self.comm_seconds / self.seconds if self.seconds else 0.0,
            wait_share=self.waiting / self.seconds if self.seconds else 0.0,
            read_share=self.reading / self.seconds if self.seconds else 0.0,
            sent_bytes=self.sent_bytes / max(1, self.steps),
            shared_bytes=self.shared_bytes / max(1, self.steps),
            dense_bytes=trainer.dense_bytes,
            ended=trainer.watch.ended() or f"all {trainer.total_steps} steps are done",
        )


def _tell(write: Write, saved: tuple[Path, float] | None) -> None:
    if saved:
        folder, seconds = saved
        write(Saved(int(folder.name.rpartition("-")[2]), str(folder), seconds))


@contextmanager
def _recorder(trainer: Trainer, tell: Write | None) -> Iterator[Write]:
    with ExitStack() as stack:
        writes = [tell] if tell else []
        if trainer.comm.rank == 0:
            reports = recorder(
                trainer.config,
                trainer.total_steps,
                trainer.steps_done,
                tests_again=_lacks_test(trainer),
            )
            writes.append(stack.enter_context(reports))

        def write(record: Record) -> None:
            for one in writes:
                one(record)

        yield write


def _start(trainer: Trainer) -> Start:
    software = provenance()
    return Start(
        ranks=trainer.comm.size,
        processes=trainer.comm.allgather(f"{socket.gethostname()}:{os.getpid()}"),
        layout=trainer.layout,
        stages=[list(names) for names in trainer.partition.layers],
        algorithm=trainer.store.algorithm,
        reason=trainer.store.reason,
        parameters=trainer.model.size,
        config=msgspec.to_builtins(trainer.config),
        date=software.pop("date"),
        software=software,
        devices=trainer.comm.allgather(trainer.device.name),
    )
