"""Parameters that are updated in different ways: groups by name."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from mpitrain.config import ConfigError, Optim
from mpitrain.optim import Optimizer


@dataclass(frozen=True)
class Group:
    """How some parameters are updated.

    Attributes:
        optimizer: of the same kind in all groups of a job.
        rate: factor on the job's learning rate.
    """

    optimizer: Optimizer
    rate: float = 1.0


#: The group of a parameter, by its name in the model.
Grouping = Callable[[str], Group]


def one(optimizer: Optimizer) -> Grouping:
    """All parameters alike."""
    group = Group(optimizer)
    return lambda name: group


def by_name(optim: Optim, usual: Optimizer, names: Sequence[str]) -> Grouping:
    """What ``optim.groups`` asks for.

    Args:
        optim: the table.
        usual: of parameters in no group.
        names: of all parameters of the model.

    Raises:
        ConfigError: a pattern fits no parameter.
    """
    found: dict[str, Group] = {}
    for number, asked in enumerate(optim.groups):
        changed: Any = {}
        if asked.weight_decay is not None:
            changed["weight_decay"] = asked.weight_decay
        group = Group(replace(usual, **changed) if changed else usual, asked.lr)  # type: ignore[type-var]
        for pattern in asked.names:
            if not (fit := [name for name in names if fnmatchcase(name, pattern)]):
                raise ConfigError(
                    f"optim.groups: {pattern!r} of group {number} fits no parameter; there are "
                    f"{_some(names)}"
                )
            for name in fit:
                found.setdefault(name, group)
    rest = Group(usual)
    return lambda name: found.get(name, rest)


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join([*shown[:8], *(["..."] if len(shown) > 8 else [])])
