"""Groups of parameters, by name, with optimisers and rates of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from mpitrain.config import ConfigError, Optim
from mpitrain.optim.optimizers import Optimizer
from mpitrain.optim.schedule_table import ScheduleTable


@dataclass(frozen=True)
class ParameterGroup:
    """How some parameters are updated.

    Attributes:
        optimizer: the optimiser, of the same kind in all groups of a job.
        rate: factor on the job's learning rate.
        number: number among the groups of an optimiser of torch.
        table: rate and other scheduled options in each step, if they are in a table.
    """

    optimizer: Optimizer
    rate: float = 1.0
    number: int = 0
    table: ScheduleTable | None = None

    def at(self, step: int) -> "ParameterGroup":
        """The group in a step, counted from 0."""
        if self.table is None or self.table.options is None:
            return self
        row = self.table.row(step)
        changed = {name: of[row] for name, of in self.table.options[self.number].items()}
        torchs: Any = self.optimizer
        optimizer = torchs.changed(changed) if changed else torchs
        return ParameterGroup(optimizer, self.table.factor(step, self.number), self.number)


#: The group of a parameter, by its name in the model.
Grouping = Callable[[str], ParameterGroup]


def scheduled(grouping: Grouping, table: ScheduleTable) -> Grouping:
    """Groups with the rates of a table that has a column for each."""
    in_table = cache(lambda group: replace(group, table=table))
    return lambda name: in_table(grouping(name))


def one(optimizer: Optimizer) -> Grouping:
    """All parameters alike."""
    group = ParameterGroup(optimizer)
    return lambda name: group


def by_name(optim: Optim, usual: Optimizer, names: Sequence[str]) -> Grouping:
    """The groups of ``optim.groups``, else ``usual``; ConfigError: a pattern fits no name."""
    found: dict[str, ParameterGroup] = {}
    for number, asked in enumerate(optim.groups):
        own: Any = usual
        if asked.weight_decay is not None:
            own = replace(own, weight_decay=asked.weight_decay)
        group = ParameterGroup(own, asked.lr)
        for pattern in asked.names:
            if not (fit := [name for name in names if fnmatchcase(name, pattern)]):
                raise ConfigError(
                    f"optim.groups: {pattern!r} of group {number} fits no parameter; there are "
                    f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
                )
            for name in fit:
                found.setdefault(name, group)
    rest = ParameterGroup(usual)
    return lambda name: found.get(name, rest)
