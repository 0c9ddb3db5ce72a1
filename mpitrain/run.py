"""A run of training: the loop over epochs."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from mpi4py import MPI

from mpitrain.callbacks import Callbacks, is_test_due, is_test_missing, running
from mpitrain.metrics.records import Epoch, Record, Summary, Write
from mpitrain.ranks.same import expect_same
from mpitrain.training.parts import Parts
from mpitrain.update.agreement import Diverged


class Steps(Protocol):
    """A loop of a job, or an object such as :class:`mpitrain.Trainer` that has one."""

    @property
    def parts(self) -> Parts: ...

    def steps(self, epoch: int) -> Generator[Sequence[Record]]: ...


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
        Diverged: on all ranks: a loss or gradient is not finite (NonFinite), which no checkpoint
            holds, or losses are far above those before (Spike).  As after any error on all ranks, a
            checkpoint that was being written is completed first.
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
        while not _has_ended(loop, run):
            pass
        parts.purity.expect(f"step {parts.steps_done}")  # what the last update has shown
        return run.finish(), run.tests


def _has_ended(loop: Steps, run: Callbacks) -> bool:
    """Take all steps that are left; false: a spike of the loss has sent all ranks back."""
    parts = loop.parts
    try:
        if is_test_missing(parts):
            run.test()
        while parts.steps_done < parts.total_steps and not run.ended():
            with closing(loop.steps(parts.epoch)) as steps:
                for records in steps:
                    for record in records:
                        run.write(record)
                    run.after_steps()
            if parts.stopping:
                run.stop()
            if is_test_due(parts):
                run.test()
    except Diverged as error:
        for record in error.before:
            run.write(record)
        run.go_back(error)
        return False
    return True
