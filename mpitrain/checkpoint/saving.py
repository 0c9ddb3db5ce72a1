"""Save a run's progress as checkpoints, and go on from the newest."""

from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.checkpoint.changes import kept_constants, origin_of
from mpitrain.checkpoint.manifest import CheckpointError, Unreadable
from mpitrain.checkpoint.state import collect, restore
from mpitrain.checkpoint.writer import Writer
from mpitrain.config import Config
from mpitrain.data import DataError
from mpitrain.metrics.records import Resumed
from mpitrain.ranks.together import together

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts
from mpitrain import extras

#: A run's checkpoints in its ``run.dir``.
FOLDER = "checkpoints"


def checkpoints(config: Config) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.run.dir) / FOLDER


def save(parts: "Parts", writer: Writer, *, best: bool = False) -> tuple[Path, float] | None:
    """Begin a checkpoint of the newest step, or of the best test; collective.

    Returns folder and seconds of the checkpoint that is complete now: the one before, or this one.
    """
    before = writer.finish()
    # If replicas differ, one of them is wrong, and no checkpoint may keep its values.
    parts.check_replicas(f"before the checkpoint after step {parts.steps_done}")
    parts.gradient.expect_finite(parts.steps_done)
    with parts.span("checkpoint", "checkpoint"):
        arrays, pieces, manifest = collect(parts)
        if manifest.constants:
            writer.keep_constants(manifest.constants, lambda: kept_constants(parts))
        done = writer.begin(parts.steps_done, arrays, pieces, manifest, best=best)
    return before or done


def resume(parts: "Parts", *, allow_changes: bool = False, before: float = inf) -> Resumed | None:
    """Restore the newest complete checkpoint in ``run.dir``, if there is one; collective.

    ``allow_changes``: accept the checkpoint of another job, as far as it fits; ``before``: step
    that it must not have done.

    Raises:
        CheckpointError: on all ranks; it is another job's, or none of several can be used.
        ConfigError, DataError: on all ranks: the program's own scheduler or sampler fails.
    """
    refused: list[str] = []
    while True:
        checkpoint, why = extras.newest(checkpoints(parts.config), parts.comm, before)
        refused += why
        if checkpoint is None:
            if refused:
                raise CheckpointError(f"no checkpoint can be used: {'; '.join(refused)}")
            return None
        origin_of(parts)
        act = partial(restore, parts, checkpoint, allow_changes=allow_changes)
        try:
            notes = together(parts.comm, act, CheckpointError, DataError)
            break
        except Unreadable as error:  # it has gone since then; one of the same tensors replaces all
            refused.append(str(error))
            before, allow_changes = checkpoint.manifest.progress.step, False
    parts.refresh()
    if parts.rates.ahead != parts.rates.tabulated:
        parts.rates.tabulate(parts.comm, parts.objects.schedule)
    if parts.measured_rates:
        parts.measured_rates.resume(parts.steps_done)
    return Resumed(parts.steps_done, str(checkpoint.folder), refused, notes)
