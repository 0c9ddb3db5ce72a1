"""How a job's ranks, positions and layers are cut: layout, partition, schedule."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf, lcm
from typing import TYPE_CHECKING

import numpy as np

from mpitrain import extras
from mpitrain.config import Config, ConfigError
from mpitrain.data import Dataset
from mpitrain.group import TensorGroup, share
from mpitrain.metrics.words import counted
from mpitrain.models import SequentialModel
from mpitrain.parallel.grid import Layout, axes
from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.replay import PipelineError, Report, replay
from mpitrain.pipeline.schedules import SCHEDULES, PipelineSchedule, sent_ahead

if TYPE_CHECKING:
    from mpitrain.nn.positions import Positions
    from mpitrain.nn.rows import Rows


def layout_of(config: Config, ranks: int) -> Layout:
    """The grid of a job on this number of ranks; ConfigError names the number that would fit."""
    p = config.parallel
    context, rows = p.context * p.space, p.space > 1  # only one of both is above 1
    alike, needed = config.width(ranks), config.needed(ranks)
    if needed != ranks:
        width = "-".join(map(str, p.replicas)) or alike
        asked = axes(width, config.stages, p.tensor, context, rows=rows)
        raise ConfigError(
            f"parallel: {asked} needs {counted(needed, 'rank')}, but there "
            f"{'is' if ranks == 1 else 'are'} {ranks}; start {needed}, or change the axes in "
            "[parallel]"
        )
    replicas = p.replicas or (alike,) * p.pipe
    among = replicas[0] * context
    if among % p.experts:
        raise ConfigError(
            f"parallel.experts: {among} replicas cannot be cut into groups of {p.experts}; take a "
            "number that divides them"
        )
    spread = 0 if config.model.kind == "recommender" else p.experts
    return Layout(replicas, p.tensor, context, spread, rows)


def cut_of(config: Config, group: TensorGroup, data: Dataset) -> "Positions | Rows | None":
    """The cut of the positions of a job's samples, or of the rows of its images, over a group.

    None where each rank has whole ones.  ConfigError: samples are too short, or vary in size, or
    tensor ranks cannot share positions.
    """
    p = config.parallel
    if p.context == p.space == 1:
        return None
    if data.varies:
        key = "space" if p.space > 1 else "context"
        raise ConfigError(
            f"parallel.{key}: samples of many sizes cannot be cut alike; pad them to one size, or "
            f"set parallel.{key} = 1"
        )
    if p.space > 1:
        return extras.Rows(group, data.input_shape[0])
    try:
        found: Positions = extras.Positions(group, data.input_shape[0], p.attention)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    lengths = [found.count(rank) for rank in range(group.size)]
    if p.sequence and any(length % p.tensor for length in lengths):
        raise ConfigError(
            f"parallel.sequence: {p.tensor} tensor ranks cannot share the positions of a context "
            f"rank, {max(lengths)}; take a data.context that {2 * p.tensor * p.context} divides"
        )
    return found


@dataclass(frozen=True)
class Partition:
    """Layers of each virtual stage.

    Attributes:
        layers: names of the layers, for each virtual stage.
        stages: number of stages, that is, ranks of a pipeline.
        schedule: the schedule, which places the virtual stages.
    """

    layers: tuple[tuple[str, ...], ...]
    stages: int
    schedule: PipelineSchedule

    def of_stage(self, stage: int) -> list[tuple[str, ...]]:
        """The layers of each chunk of a stage."""
        return [names for v, names in enumerate(self.layers) if self._at(v) == stage]

    def stage_of(self, layer: str) -> int:
        """Number of the stage that has a layer."""
        return self._at(next(v for v, names in enumerate(self.layers) if layer in names))

    def needs_samples(self, stage: int) -> bool:
        """Whether a stage has the first virtual stage, which takes inputs, or the last, labels."""
        return stage in (self._at(0), self._at(len(self.layers) - 1))

    def _at(self, virtual: int) -> int:
        return self.schedule.placement(self.stages, virtual)


def partition_of(config: Config, model: SequentialModel, grid: Layout) -> Partition:
    """Cut the layers into virtual stages.

    ConfigError: the layers are too few, or ``parallel.partition`` or ``parallel.profile`` does not
    fit them.
    """
    names, stages = list(model.layers), grid.stages
    found = SCHEDULES[config.parallel.schedule]
    parts = stages * (found.chunks or config.parallel.chunks)
    if len(names) < parts:
        own = ", or name the blocks of a torch module by cuts=" if config.own.model else ""
        raise ConfigError(
            f"parallel.pipe: a model of {counted(len(names), 'layer')} cannot be cut into {parts} "
            f"stages; take fewer stages or chunks, or more layers{own}"
        )
    wanted = config.parallel.partition
    profile = extras.profiled(config) if config.parallel.profile else []
    if profile and (layers := [layer.name for layer in profile]) != names:
        raise ConfigError(
            f"parallel.profile: {config.parallel.profile} has the layers {', '.join(layers)}, and "
            f"the model {', '.join(names)}; run mpitrain profile again"
        )
    if isinstance(wanted, tuple):
        if sum(wanted) != len(names):
            raise ConfigError(
                f"parallel.partition: {list(wanted)} is {sum(wanted)} layers, and the model has "
                f"{len(names)}: {', '.join(names)}"
            )
        sizes = list(wanted)
    elif wanted == "auto":
        widths = [grid.replicas[found.placement(stages, part)] for part in range(parts)]
        sizes = list(extras.partition(extras.Costs(profile, inf), widths).sizes)
    else:
        bounds = [share(len(names), part, parts) for part in range(parts)]
        sizes = [bound.stop - bound.start for bound in bounds]
    ends = np.cumsum([0, *sizes]).tolist()
    return Partition(tuple(tuple(names[a:b]) for a, b in pairwise(ends)), stages, found)


def shared_stages(
    model: SequentialModel, cut: Partition, grid: Layout
) -> dict[str, frozenset[int]]:
    """Stages that share a tensor, by its name, for each tensor that several stages hold.

    ConfigError: these stages update unequally often.
    """
    stages = {
        name: frozenset(cut.stage_of(layer) for layer in layers)
        for name, layers in model.ties().items()
    }
    shared = {name: found for name, found in stages.items() if len(found) > 1}
    for name, found in shared.items() if not cut.schedule.synchronous else ():
        if len({grid.replicas[stage] for stage in found}) > 1:
            among = ", ".join(map(str, sorted(found)))
            raise ConfigError(
                f"parallel.replicas: stages {among} share {name}, and an asynchronous stage of "
                "fewer replicas updates more often; give these stages equally many replicas, or "
                "set schedule = '1f1b'"
            )
    return shared


def schedule_of(
    config: Config, found: PipelineSchedule, grid: Layout, steps: int = 1
) -> tuple[Pipeline, Report]:
    """The schedule of ``steps`` steps without draining, and the proof that it works, which may be a
    ConfigError."""
    p, train = config.parallel, config.train
    parts = train.micro_batches * lcm(*grid.replicas)
    if found.synchronous:
        pipeline = found.pipeline(grid.replicas, parts, p.chunks)
    else:
        pipeline = found.pipeline(grid.replicas, parts * steps, p.chunks, train.micro_batches)
        ahead = max(sent_ahead(pipeline, stage) for stage in range(grid.stages))
        if p.weights == "two_buffers" and train.micro_batches < ahead:
            raise ConfigError(
                f"train.micro_batches: two_buffers on {grid.stages} stages needs at least "
                f"{ahead}, not {train.micro_batches}"
            )
    try:
        return pipeline, replay(found.generate, pipeline)
    except ValueError as error:
        is_unequal = isinstance(error, PipelineError) and len(set(grid.replicas)) > 1
        hint = "; take 1f1b or zero_bubble for stages of unequal width" if is_unequal else ""
        raise ConfigError(f"parallel.schedule: {error}{hint}") from error
