"""A schedule of the program's own: what the scaled rate is multiplied by in each step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpitrain.arrays import Array
from mpitrain.config import ConfigError, Optim
from mpitrain.ranks.together import together

#: ``factor(step)``: what the scaled rate is multiplied by in a step, counted from 0.
Factor = Callable[[int], float]


@dataclass(frozen=True)
class Table:
    """A schedule of the program's own, worked out before the first step.

    Attributes:
        factors: what the scaled rate is multiplied by, of shape (rows, groups of parameters), or
            (rows, 1) for all groups alike, each times its own factor.
        steps: that a row is for: 1, or those of an epoch.
        options: what else each group is updated with in each row, by name; None: nothing.
    """

    factors: Array
    steps: int = 1
    options: Sequence[Mapping[str, Sequence[Any]]] | None = None

    def factor(self, step: int, group: int = 0) -> float:
        """Of a step, counted from 0."""
        return float(self.factors[step // self.steps, group])


class Schedule(ABC):
    """A schedule that says itself what it is in each step."""

    @abstractmethod
    def table(self, rows: int) -> Table:
        """Of so many steps or epochs; ``ConfigError`` if it cannot be worked out."""


def tabulated(factor: Factor, steps: int) -> Array:
    """A program's own factors of all steps, of shape (steps,), float64.

    Raises:
        ConfigError: one of them is no number, negative or not finite, or cannot be computed.
    """
    found = np.empty(steps)
    for step in range(steps):
        try:
            found[step] = value = factor(step)
        except Exception as error:  # whatever a program's own function raises
            raise ConfigError(
                f"schedule: the function fails at step {step}: {type(error).__name__}: {error}; it "
                "takes the step's number, or with optimizer= of torch that optimiser, of which it "
                "makes one of torch.optim.lr_scheduler"
            ) from error
        if not 0.0 <= found[step] < math.inf:
            raise ConfigError(
                f"schedule: the function gives {value} at step {step}; a factor is a finite "
                "number from 0 on"
            )
    return found


def agreed(
    comm: MPI.Intracomm,
    optim: Optim,
    schedule: Factor | Schedule | None,
    steps_per_epoch: int,
    total_steps: int,
) -> Table | None:
    """What rank 0's ``schedule`` is in all steps of a run, told to all ranks; collective.

    Returns:
        The table, or None without a schedule of the program's own.

    Raises:
        ConfigError: on all ranks: the [optim] table names another schedule, or rank 0's cannot be
            worked out.
    """
    if schedule is None:
        if optim.schedule_by != "step":
            raise ConfigError(
                f"optim.schedule_by = {optim.schedule_by!r} is of a schedule of one's own, and "
                "there is none; leave it out"
            )
        return None
    if optim.schedule != "constant" or optim.warmup_epochs:
        raise ConfigError(
            f"optim.schedule = {optim.schedule!r} with optim.warmup_epochs = "
            f"{optim.warmup_epochs:g}: a schedule of one's own takes the place of both; leave "
            "them out"
        )
    steps = steps_per_epoch if optim.schedule_by == "epoch" else 1
    rows = -(-total_steps // steps)

    def made() -> Table | None:
        if comm.rank > 0:
            return None
        if isinstance(schedule, Schedule):
            return replace(schedule.table(rows), steps=steps)
        return Table(tabulated(schedule, rows)[:, None], steps)

    table: Table = comm.bcast(together(comm, made, ConfigError))
    return table
