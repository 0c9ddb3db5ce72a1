"""Makes parts of a job from its tables: optimiser, sums, store."""

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import Communicator
from collectives.extras import Dice
from mpitrain import extras
from mpitrain.arrays import Array
from mpitrain.config import Compress, Config, ConfigError, Optim
from mpitrain.objective import reduction_of
from mpitrain.optim.optimizers import LAMB, LARS, SGD, Adam, Optimizer
from mpitrain.parallel.arena import DATA
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.store import Allocate, Reduction, Store
from mpitrain.parallel.summation import Dense, Summation
from mpitrain.ranks.together import together
from mpitrain.training.parts import Parts

if TYPE_CHECKING:
    from mpitrain.parallel.compressed_summation import CodingOptions


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
    return Dense(p.algorithm if p.zero < 2 else "auto")


def summation(config: Config, replica: int) -> Summation:
    """The summation of gradients over replicas, dense or with a codec, on this replica."""
    if config.sync.combine == "adasum":
        return extras.Adasum()
    if config.compress.codec == "none":
        return dense(config)
    how = compression(config.compress)
    dice, anew = Dice(config.run.seed, replica), config.parallel.zero > 1
    return extras.CompressedSummation(how, dice, dense(config), anew=anew)


def reduction(config: Config, groups: Mapping[str, Communicator], replica: int) -> Reduction:
    """The reduction of a job's gradients over these groups of ranks, on this replica."""
    p = config.parallel
    # If replicas train by themselves, each gradient belongs to one replica and stays exact.
    how = dense(config) if config.sync.drifts else summation(config, replica)
    return Reduction(groups, how, p.bucket_bytes, p.overlap, p.prefetch)


def compression(table: Compress) -> "CodingOptions":
    """Options of the codec that [compress] names."""
    return extras.CodingOptions(table, extras.parse_codec(table.codec))


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


def in_replicas(parts: Parts, flat: Array) -> tuple[Store, Communicator]:
    """The store that ``parallel.zero`` asks for, and the ranks that share a gradient; collective.

    These are the ranks of this replica if workers train by themselves, else all.
    """
    config, grid, arena = parts.config, parts.grid, parts.arena
    comms, ranks = grid.within() if config.sync.drifts else (grid.groups, parts.comm)
    how = summation(config, grid.data.rank)
    exact = [tensor.name for tensor in arena.tensors if tensor.group != DATA]

    def expect_sums() -> None:
        if how.no_sum and exact:
            raise ConfigError(
                f"{how.no_sum}, and {', '.join(exact[:3])} are summed over other ranks than the "
                "replicas; leave that key out"
            )

    together(parts.comm, expect_sums, ConfigError)
    kinds = (Replicated, extras.ShardedOptimizer, extras.ShardedGradients, extras.ShardedParameters)
    kind: Any = kinds[config.parallel.zero]
    reduced = reduction(config, comms, grid.data.rank)
    return kind(arena, flat, reduced, parts.device.allocate(grid.data)), ranks


def counting(parts: Parts, *, is_changed: bool = False) -> Communicator | None:
    """Ranks whose counts divide gradients before their sum, as :class:`Parts` says.

    ``is_changed``: whether gradients change before the ranks agree on a step.
    """
    config = parts.config
    if reduction_of(parts.model.loss) != "count":
        return None
    if config.server.ranks or config.server.hogwild:  # a worker's group, or all ranks
        return parts.store.reduction.groups[DATA]
    is_coded = config.compress.codec != "none" and not config.sync.drifts
    return parts.comm if is_changed or (is_coded and config.parallel.zero < 2) else None


def cut_by(config: Config) -> list[str]:
    """Keys of [parallel] by which ranks have parts of parameters."""
    p = config.parallel
    return ["zero"] * (p.zero > 0) + ["tensor"] * (p.tensor > 1)


def expect_whole(config: Config) -> None:
    """Raise ConfigError if an optimiser needs whole parameters, and ranks have parts of them."""
    for key in cut_by(config):
        raise ConfigError(
            f"optimizer: {config.own.optimizer} goes by whole parameters, and parallel.{key} cuts "
            "them; leave it out, or take an optimiser that updates each number by itself, as "
            "torch.optim.AdamW"
        )
