"""Sections of workers that train by themselves in checkpoints.

The section ``parameters`` has the workers' common weights, as tests see them, and ``parameters@2``
those of worker 2; likewise each slot of the optimiser.  An equal number of workers with the same
[sync] goes on bit by bit, in any layout of stages and tensor ranks.  Others begin with the common
weights and the mean of the optimisers' states, as if all had met at that step.
"""

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.arrays import Array
from mpitrain.checkpoint.manifest import EXCHANGE
from mpitrain.group import share
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.update.updater import AVERAGE

if TYPE_CHECKING:
    from mpitrain.checkpoint.reader import CheckpointReader
    from mpitrain.training.parts import Parts


def section(name: str, worker: int) -> str:
    """Name of a worker's own section."""
    return f"{name}@{worker}"


def state(parts: "Parts") -> tuple[Mapping[str, Array], Mapping[str, Array]]:
    """Arrays that all workers share, and those of this worker alone; empty if none differ."""
    if parts.strategy is None:
        return {}, {}
    arrived, own = parts.strategy.state()
    return {**parts.strategy.shared, **arrived}, own


def drift(parts: "Parts") -> float:
    """The workers' drift at the last exchange, told by a step's record or not yet; collective."""
    if parts.strategy is None:
        return 0.0
    away, anchor = parts.comm.allreduce(np.array(parts.strategy.strayed))
    return sqrt(away / anchor) if anchor else parts.account.drift


def together(parts: "Parts", shared: Mapping[str, Array]) -> dict[str, Array]:
    """Sections that all workers share, flat; empty if workers do not differ; collective."""
    if (strategy := parts.strategy) is None:
        return {}
    found = {"parameters": strategy.consensus(), **shared}
    if parts.config.optim.average:
        found[AVERAGE] = strategy.mean(parts.updater.slot(AVERAGE))
    return found


def among(owned: slice, grid: ProcessGrid) -> slice:
    """Part of a piece's shared elements that this worker writes."""
    part = share(owned.stop - owned.start, grid.place.replica, grid.data.size)
    return slice(owned.start + part.start, owned.start + part.stop)


def named(parts: "Parts", counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by tensor, under this worker's names in a checkpoint."""
    if not parts.config.sync.drifts:
        return dict(counts)
    return {section(name, parts.grid.place.replica): count for name, count in counts.items()}


def left_out(parts: "Parts", checkpoint: "CheckpointReader", as_they_were: bool) -> dict[str, int]:
    """Counts from a checkpoint: this worker's, or for other workers the least of each tensor."""
    saved, count = checkpoint.manifest.progress.left_out, _workers(checkpoint, "parameters")
    if not count:
        return dict(saved)
    whose = [parts.grid.place.replica] if as_they_were else range(count)
    names = {key.rpartition("@")[0] for key in saved}
    found = {name: min(saved.get(section(name, one), 0) for one in whose) for name in names}
    return {name: least for name, least in found.items() if least}


def are_those_of(parts: "Parts", checkpoint: "CheckpointReader") -> bool:
    """Whether the same number of workers goes on with the same [sync]."""
    then = _workers(checkpoint, "parameters")
    if not parts.config.sync.drifts:
        return not then
    return then == parts.grid.data.size and checkpoint.job.sync == parts.config.sync


def begun_anew(parts: "Parts", checkpoint: "CheckpointReader", taken: set[str]) -> list[str]:
    """Sentence on the sections that other workers leave behind."""
    then, now = _workers(checkpoint, "parameters"), parts.grid.data.size
    had = {name for name in checkpoint.sections if not name.startswith((EXCHANGE, "state"))}
    left = sorted({name.partition("@")[0] for name in had} - taken)
    if not then and not left:
        return []
    began = f"{now} workers begin with the mean of what {then} had" if then else "the run goes on"
    return [f"{began}, without their {', '.join(left)}" if left else began]


def tensor(checkpoint: "CheckpointReader", name: str, tensor_name: str) -> Array:
    """A whole tensor of a section, or the mean of the workers' sections; errors of the reader."""
    count = _workers(checkpoint, name)
    if name in checkpoint.sections or not count:
        return checkpoint.tensor(name, tensor_name)
    total = np.zeros(checkpoint.manifest.shapes[tensor_name])
    for worker in range(count):
        total += checkpoint.tensor(section(name, worker), tensor_name)
    return (total / count).astype(checkpoint.manifest.dtypes[tensor_name])


def _workers(checkpoint: "CheckpointReader", name: str) -> int:
    """Number of workers with sections of this name."""
    count = 0
    while section(name, count) in checkpoint.sections:
        count += 1
    return count
