"""What checkpoints have of workers that train by themselves: each one's, and what they share.

The section ``parameters`` has the workers' weights together, as tests see them, and
``parameters@2`` those of worker 2; so has each slot of the optimiser.  As many workers of the same
[sync] go on as they were, bit by bit, in any layout of stages and tensor ranks.  Others begin with
the weights together and the mean of the optimisers' states: as if all had met at that step.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.arrays import Array
from mpitrain.checkpoint.manifest import EXCHANGE
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.group import share
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.step.update import AVERAGE

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts


def section(name: str, worker: int) -> str:
    """What one worker has of a section."""
    return f"{name}@{worker}"


def together(trainer: "Parts") -> dict[str, Array]:
    """Sections that all workers have the same, in the arena's layout; collective.

    None for workers that have the same of everything.
    """
    strategy = trainer.strategy
    strategy.quiesce()
    parameters = strategy.consensus()
    if parameters is None:
        return {}
    found = {"parameters": parameters}
    if trainer.config.optim.average:
        found[AVERAGE] = strategy.mean(trainer.updater.slot(AVERAGE))
    return found | shared(trainer)


def shared(trainer: "Parts") -> dict[str, Array]:
    """Those of them that are the strategy's own."""
    return {**trainer.strategy.shared(), **trainer.strategy.arrived()}


def among(counted: slice, grid: ProcessGrid) -> slice:
    """The part of a piece that this worker writes of what all workers have."""
    part = share(counted.stop - counted.start, grid.place.replica, grid.data.size)
    return slice(counted.start + part.start, counted.start + part.stop)


def named(trainer: "Parts", counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by tensor, under the names that this worker has for them in a checkpoint."""
    if not trainer.strategy.drifts:
        return dict(counts)
    return {section(name, trainer.grid.place.replica): count for name, count in counts.items()}


def left_out(trainer: "Parts", checkpoint: Checkpoint, as_they_were: bool) -> dict[str, int]:
    """Those counts back: this worker's own, or where others go on, of each tensor the least.

    What one of the workers has used is used.
    """
    saved, count = checkpoint.manifest.progress.left_out, _workers(checkpoint, "parameters")
    if not count:
        return dict(saved)
    whose = [trainer.grid.place.replica] if as_they_were else range(count)
    names = {key.rpartition("@")[0] for key in saved}
    found = {name: min(saved.get(section(name, one), 0) for one in whose) for name in names}
    return {name: least for name, least in found.items() if least}


def are_those_of(trainer: "Parts", checkpoint: Checkpoint) -> bool:
    """Whether workers go on as they were: as many, with the same [sync]."""
    then = _workers(checkpoint, "parameters")
    if not trainer.strategy.drifts:
        return not then
    return then == trainer.grid.data.size and checkpoint.job.sync == trainer.config.sync


def begun_anew(trainer: "Parts", checkpoint: Checkpoint, taken: set[str]) -> list[str]:
    """What workers leave behind that do not go on as they were, in a sentence."""
    then, now = _workers(checkpoint, "parameters"), trainer.grid.data.size
    had = {name for name in checkpoint.sections if not name.startswith((EXCHANGE, "state"))}
    left = sorted({name.partition("@")[0] for name in had} - taken)
    if not then and not left:
        return []
    began = f"{now} workers begin with the mean of what {then} had" if then else "the run goes on"
    return [f"{began}, without their {', '.join(left)}" if left else began]


def tensor(checkpoint: Checkpoint, name: str, tensor_name: str) -> Array:
    """A tensor of a section, whole; the workers' mean, if there is none that all have.

    Raises:
        CheckpointError: it is not in the checkpoint, or not all of it.
    """
    count = _workers(checkpoint, name)
    if name in checkpoint.sections or not count:
        return checkpoint.tensor(name, tensor_name)
    total = np.zeros(checkpoint.manifest.shapes[tensor_name])
    for worker in range(count):
        total += checkpoint.tensor(section(name, worker), tensor_name)
    return (total / count).astype(checkpoint.manifest.dtypes[tensor_name])


def _workers(checkpoint: Checkpoint, name: str) -> int:
    """How many workers have a section of their own of this name."""
    count = 0
    while section(name, count) in checkpoint.sections:
        count += 1
    return count
