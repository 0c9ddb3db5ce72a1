"""Makes parts of a job from its tables: layout, partition, store, schedule."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.codec import Dice
from mpitrain.arrays import Array
from mpitrain.compress import parse
from mpitrain.compress.codec import feedback_of
from mpitrain.config import Compress, Config, ConfigError, Optim
from mpitrain.data import Dataset
from mpitrain.group import TensorGroup, share
from mpitrain.models import SequentialModel
from mpitrain.nn.positions import Positions
from mpitrain.optim.optimizers import LAMB, LARS, SGD, Adam, Optimizer
from mpitrain.parallel.adasum_sum import Adasum
from mpitrain.parallel.arena import Arena
from mpitrain.parallel.compressed_summation import CodingOptions, CompressedSummation
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.grid import Layout, axes
from mpitrain.parallel.node_shared import NodeShared
from mpitrain.parallel.store import Allocate, Reduction, Store
from mpitrain.parallel.summation import Dense, Summation
from mpitrain.parallel.zero import ShardedGradients, ShardedOptimizer, ShardedParameters
from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.replay import PipelineError, Report, replay
from mpitrain.pipeline.schedule_file import find
from mpitrain.pipeline.schedules import PipelineSchedule
from mpitrain.sync import Delayed, Local, Quorum, Strategy, Workers
from mpitrain.sync.replay import choices


def layout(config: Config, ranks: int) -> Layout:
    """The grid of a job on this number of ranks; ConfigError names the number that would fit."""
    p = config.parallel
    each = p.context * p.tensor
    data = p.data or max(1, ranks // (p.pipe * each))
    needed = (sum(p.replicas) or data * p.pipe) * each
    if needed != ranks:
        asked = axes("-".join(map(str, p.replicas)) or data, config.stages, p.tensor, p.context)
        raise ConfigError(
            f"parallel: {asked} needs {needed} ranks, but there are {ranks}; start as many, or "
            "change data, pipe or tensor"
        )
    replicas = p.replicas or (data,) * p.pipe
    among = replicas[0] * p.context
    if among % p.experts:
        raise ConfigError(
            f"parallel.experts: {among} replicas cannot be cut into groups of {p.experts}; take a "
            "number that divides them"
        )
    spread = 0 if config.model.kind == "recommender" else p.experts
    return Layout(replicas, p.tensor, p.context, spread)


def positions(config: Config, group: TensorGroup, data: Dataset) -> Positions | None:
    """The cut of the positions of a job's samples over context ranks; None where there is one.

    ConfigError: samples are too short, or vary in length, or tensor ranks cannot share positions.
    """
    if group.size == 1:
        return None
    p = config.parallel
    if data.varies:
        raise ConfigError(
            "parallel.context: samples of many lengths cannot be cut alike; pad them to one "
            "length, or set parallel.context = 1"
        )
    try:
        found = Positions(group, data.input_shape[0], p.attention)
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


def partition(config: Config, model: SequentialModel, stages: int) -> Partition:
    """Cut the layers into virtual stages.

    ConfigError: the layers are too few, or ``parallel.partition`` or ``parallel.profile`` does not
    fit them.
    """
    names = list(model.layers)
    try:
        found = find(config.parallel.schedule)
    except ValueError as error:
        raise ConfigError(f"parallel.schedule: {error}") from error
    parts = stages * (found.chunks or config.parallel.chunks)
    if len(names) < parts:
        raise ConfigError(
            f"parallel.pipe: a model of {len(names)} layers cannot be cut into {parts} stages; "
            "take fewer stages or chunks, or more layers"
        )
    wanted = config.parallel.partition
    if isinstance(wanted, tuple):
        if sum(wanted) != len(names):
            raise ConfigError(
                f"parallel.partition: {list(wanted)} is {sum(wanted)} layers, and the model has "
                f"{len(names)}: {', '.join(names)}"
            )
        if len(wanted) != parts:
            raise ConfigError(
                f"parallel.partition: {len(wanted)} numbers for {stages} stages of "
                f"{parts // stages} chunks"
            )
        sizes = list(wanted)
    elif wanted == "auto":
        sizes = _profiled(config, names, parts)
    else:
        bounds = [share(len(names), part, parts) for part in range(parts)]
        sizes = [bound.stop - bound.start for bound in bounds]
    ends = np.cumsum([0, *sizes]).tolist()
    return Partition(tuple(tuple(names[a:b]) for a, b in pairwise(ends)), stages, found)


def shared_stages(model: SequentialModel, cut: Partition) -> dict[str, frozenset[int]]:
    """Stages that share a tensor, by its name, for each tensor that several stages hold."""
    stages = {
        name: frozenset(cut.stage_of(layer) for layer in layers)
        for name, layers in model.ties().items()
    }
    return {name: found for name, found in stages.items() if len(found) > 1}


def schedule(
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
        if p.weights == "two_buffers" and train.micro_batches < grid.stages - 1:
            raise ConfigError(
                f"train.micro_batches: two_buffers on {grid.stages} stages needs at least "
                f"{grid.stages - 1}, not {train.micro_batches}"
            )
    try:
        return pipeline, replay(found.generate, pipeline)
    except ValueError as error:
        hint = "; set train.micro_batches" if not isinstance(error, PipelineError) else ""
        raise ConfigError(f"parallel.schedule: {error}{hint}") from error


def rows(config: Config, found: PipelineSchedule, grid: Layout) -> list[str]:
    """The passes of each rank of a schedule, which is proved."""
    _, report = schedule(config, found, grid)
    return [" ".join(map(str, own)) for own in report.actions.values()]


def optimizer(config: Optim) -> Optimizer:
    """The optimiser of the [optim] table."""
    betas = (config.beta1, config.beta2, config.epsilon, config.weight_decay)
    match config.name:
        case "sgd":
            return SGD(config.momentum, config.weight_decay, config.nesterov)
        case "adam":
            return Adam(*betas)
        case "adamw":
            return Adam(*betas, decoupled=True)
        case "lars":
            return LARS(config.momentum, config.weight_decay, config.trust)
        case "lamb":
            return LAMB(*betas)


def dense(config: Config) -> Dense:
    """The summation of gradients without a codec."""
    p = config.parallel
    # Sums into shards use a reduce-scatter, and not every all-reduce algorithm has one.
    whole = p.zero < 2 and not p.node_shared
    return Dense(p.algorithm if whole else "auto")


def summation(config: Config, replica: int) -> Summation:
    """The summation of gradients over replicas, dense or with a codec, on this replica."""
    if config.sync.combine == "adasum":
        return Adasum()
    if config.compress.codec == "none":
        return dense(config)
    every = config.sync.period if config.sync.drifts else 1
    how = compression(config.compress, every)
    dice, anew = Dice(config.run.seed, replica), config.parallel.zero > 1
    return CompressedSummation(how, dice, dense(config), anew=anew)


def reduction(config: Config, groups: Mapping[str, Communicator], replica: int) -> Reduction:
    """The reduction of a job's gradients over these groups of ranks, on this replica."""
    p = config.parallel
    # If replicas train by themselves, each gradient belongs to one replica and stays exact.
    how = dense(config) if config.sync.kind != "every_step" else summation(config, replica)
    return Reduction(groups, how, p.bucket_bytes, p.overlap)


def strategy(config: Config, workers: Workers) -> Strategy:
    """The strategy by which the workers of a job synchronise; collective.

    ConfigError: the layers are too few for the fragments, or ``sync.replay`` is of no such run.
    """
    s = config.sync
    if s.fragments > workers.layers:
        raise ConfigError(
            f"sync.fragments: a model of {workers.layers} layers cannot be cut into {s.fragments} "
            "fragments"
        )
    match s.kind:
        case "every_step":
            return Strategy()
        case "local":
            return Local(workers, s)
        case "delayed":
            return Delayed(workers, s)
        case "quorum":
            replay = choices(workers.comm, Path(s.replay)) if s.replay else {}
            return Quorum(workers, s, replay)


def compression(table: Compress, every: int = 1) -> CodingOptions:
    """Options of the codec that [compress] names, for sums after ``every`` steps."""
    codec = parse(table.codec)
    feedback = (feedback_of(codec) if table.feedback == "auto" else table.feedback) == "on"
    return CodingOptions(
        codec,
        feedback,
        table.start,
        table.least,
        table.exchange,
        table.flush_every,
        every,
        table.units == "update",
        table.level == "nodes",
    )


def store(
    config: Config, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
) -> Store:
    """The store of the parameters; arguments as for ``Replicated``."""
    kinds: Mapping[int, Any] = {
        0: Replicated,
        1: ShardedOptimizer,
        2: ShardedGradients,
        3: ShardedParameters,
    }
    kind = NodeShared if config.parallel.node_shared else kinds[config.parallel.zero]
    found: Store = kind(arena, initial, reduction, allocate)
    return found


def mapped(folder: Path, rank: int) -> Allocate:
    """A function that allocates arrays in files of ``folder``, which keep them out of memory.

    The system may write pages back to these files at any time.  The function raises ConfigError if
    the folder cannot be made or has no room.
    """
    numbers = count()

    def allocate(size: int, dtype: Any) -> Array:
        if not size:
            return np.empty(0, dtype)
        path = folder / f"rank{rank}.{next(numbers)}.state"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # another job that has the file mapped keeps its contents
            with path.open("w+b") as file:
                # In a file with holes, a write to a full disk would end the rank by SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size * np.dtype(dtype).itemsize)
                return np.memmap(file, dtype, mode="r+", shape=(size,))
        except OSError as error:
            raise ConfigError(
                f"parallel.offload = {str(folder)!r}: {path.name} cannot be made there "
                f"({error.strerror}); make room or choose another folder"
            ) from error

    return allocate


def _profiled(config: Config, names: list[str], parts: int) -> list[int]:
    from mpitrain.pipeline.partition import balanced_partition
    from mpitrain.pipeline.profiles import ProfileError, read_profile

    try:
        profile = read_profile(Path(config.parallel.profile))
    except ProfileError as error:
        raise ConfigError(f"parallel.profile: {error}") from error
    found = [layer.name for layer in profile]
    if found != names:
        raise ConfigError(
            f"parallel.profile: {config.parallel.profile} has the layers {', '.join(found)}, and "
            f"the model {', '.join(names)}; run mpitrain profile again"
        )
    return balanced_partition(profile, parts)
