"""The learning rate at each step: linear scaling, gradual warm-up, then a schedule."""

import math
from dataclasses import dataclass, replace
from typing import assert_never

from mpi4py import MPI

from mpitrain.config import ConfigError, Optim, Train
from mpitrain.optim.schedule_table import Factor, ScheduleTable, TabulatedSchedule, tabulated
from mpitrain.ranks.together import by_rank_0

#: Rates at the beginning and end of one_cycle, in parts of its peak: torch's defaults.
_BEGINNING = 1 / 25
_END = _BEGINNING / 1e4


@dataclass
class Rates:
    """The rates of a job's steps, counted from 0.

    Attributes:
        optim, train: the job's tables; clients' epochs are rounds.
        steps_per_epoch: updates of a pass over the data.
        table: table of a user's own schedule, if there is one.
        factor: factor on all rates, which the program sets as it trains.
        ahead: steps taken beyond those of so many epochs in batches of this size alone.
        tabulated: ``ahead`` as it was when the table was made.
    """

    optim: Optim
    train: Train
    steps_per_epoch: int
    table: ScheduleTable | None = None
    factor: float = 1.0
    ahead: int = 0
    tabulated: int = 0

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        every = self.train.epochs * self.steps_per_epoch + self.ahead
        return min(self.train.steps or every, every)

    def tabulate(self, comm: MPI.Intracomm, schedule: Factor | TabulatedSchedule | None) -> None:
        """Make the table of rank 0's ``schedule``, if there is one, on all ranks; collective.

        A table that is there, which others may have, gets the new rows.  ConfigError on all ranks:
        the [optim] table names another one, rank 0's cannot be evaluated, or the run is too short.
        """
        optim, total_steps, self.tabulated = self.optim, self.total_steps, self.ahead
        if schedule is None:
            falling = optim.decay_epochs * self.steps_per_epoch
            if optim.warmup_steps and optim.warmup_steps + falling >= total_steps:
                raise ConfigError(
                    f"optim.warmup_steps: {optim.warmup_steps} steps of climbing and {falling:g} "
                    f"of falling do not fit into the run's {total_steps} steps; take fewer"
                )
            if optim.schedule_by != "step":
                raise ConfigError(
                    f"optim.schedule_by = {optim.schedule_by!r} is of a schedule of one's own, and "
                    "there is none; leave it out"
                )
            return
        if optim.schedule != "constant" or optim.warmup_epochs or optim.warmup_steps:
            raise ConfigError(
                "optim.schedule: a schedule of one's own takes the place of schedule = "
                f"{optim.schedule!r} and of the warm-up; leave them out"
            )
        epochs = self.steps_per_epoch, self.ahead
        steps, ahead = epochs if optim.schedule_by == "epoch" else (1, 0)
        rows = max(1, -((ahead - total_steps) // steps))

        def made() -> ScheduleTable:
            if isinstance(schedule, TabulatedSchedule):
                return replace(schedule.table(rows), steps=steps, ahead=ahead)
            return ScheduleTable(tabulated(schedule, rows)[:, None], steps, ahead=ahead)

        found = by_rank_0(comm, made, ConfigError)
        self.table = self.table or found
        vars(self.table).update(vars(found))

    def rate(self, step: int) -> float:
        """Learning rate of a step, as logged."""
        if self.table is None:
            return self.factor * self._scheduled(step)
        return self.factor * (self.scaled * self.table.factor(step))

    def common(self, step: int) -> float:
        """Learning rate of a step, on which all groups of parameters have factors."""
        if self.table and self.table.options is not None:
            return self.factor * self.scaled
        return self.rate(step)

    @property
    def scaled(self) -> float:
        """The rate that a batch of ``train.batch_size`` samples has by the linear scaling rule."""
        size = self.train.batch_size
        return self.optim.lr * size / (self.optim.reference_batch or size)

    def _scheduled(self, step: float) -> float:
        """The rate of a step by the job's schedule.

        The scaled rate ``k * lr``, ``k = batch_size / reference_batch``, belongs to a batch that is
        ``k`` times larger.  During warm-up the rate climbs to it from ``lr``, step by step (Goyal
        et al. 2017, sections 2.1 and 2.2), or from 0 where it is no larger.
        """
        optim, scaled, last = self.optim, self.scaled, self.total_steps
        first = 0 if optim.warmup_steps else self.ahead
        up = first + (optim.warmup_steps or optim.warmup_epochs * self.steps_per_epoch)
        if optim.schedule == "one_cycle":
            if step < up - 1:
                return scaled * _between(_BEGINNING, 1.0, (step - first) / (up - 1 - first))
            rest = step - up + 1  # 0 at the end of a run that is all warm-up
            return scaled * _between(1.0, _END, rest and rest / (last - up))
        if step < up:
            base = optim.lr if 0 < optim.reference_batch < self.train.batch_size else 0.0
            return base + (scaled - base) * (step - first) / (up - first)
        epoch = (step - self.ahead) / self.steps_per_epoch
        match optim.schedule:
            case "constant":
                return scaled
            case "cosine":
                return scaled * _between(1.0, 0.0, (step - up) / (last - up))
            case "linear":
                return scaled * (last - step) / (last - up)
            case "step":
                return scaled * optim.decay ** sum(epoch >= passed for passed in optim.milestones)
            case "wsd":
                # A run of fewer steps may leave less than the whole fall behind the warm-up.
                falling, rest = (
                    min(optim.decay_epochs * self.steps_per_epoch, last - up),
                    last - step,
                )
                return scaled * min(1.0, rest and rest / falling)
            case _:
                assert_never(optim.schedule)


def _between(first: float, last: float, part: float) -> float:
    """From ``first`` to ``last`` along half a cosine; ``part`` of the way is done, 0 to 1."""
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * part))
