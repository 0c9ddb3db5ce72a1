"""Schedules of a user's own: factors on the scaled rate for each step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.errors import words
from mpitrain.arrays import Array
from mpitrain.config import ConfigError

#: ``factor(step)``: factor on the scaled rate in a step, counted from 0.
Factor = Callable[[int], float]


@dataclass(eq=False)
class ScheduleTable:
    """A user's own schedule, evaluated before the first step.

    Attributes:
        factors: factors on the scaled rate, of shape (rows, groups of parameters), or (rows, 1)
            for all groups, each times its own factor.
        steps: steps of a row: 1, or those of an epoch.
        ahead: steps before the first row, as of :class:`~mpitrain.optim.lr.Rates`.
        options: other options of each group in each row, by name; None: there are none.
        follows: ``"min"`` or ``"max"``: the rows after a test follow from what it measured, of
            which the scheduler wants the least or the most; empty: all rows are known.
    """

    factors: Array
    steps: int = 1
    options: Sequence[Mapping[str, Sequence[Any]]] | None = None
    follows: str = ""
    ahead: int = 0

    def row(self, step: int) -> int:
        """The row of a step, counted from 0; IndexError: the step comes before all rows."""
        if step < self.ahead:
            raise IndexError(f"step {step} comes before the first of the table, {self.ahead}")
        return (step - self.ahead) // self.steps

    def factor(self, step: int, group: int = 0) -> float:
        """The factor of a step, counted from 0."""
        return float(self.factors[self.row(step), group])


class TabulatedSchedule(ABC):
    """A schedule that makes its own table."""

    @abstractmethod
    def table(self, rows: int) -> ScheduleTable:
        """The table of all steps or epochs; ``ConfigError``: it cannot be evaluated."""

    @abstractmethod
    def after_tests(self, values: Sequence[float], *, anew: bool) -> list[float]:
        """Factors of the groups after further tests, for a table that follows tests.

        ``values``: measured values of the tests, in turn, nan where not finite; ``anew``: begin
        with the first test of the run.  ConfigError: a test leads to no factors.
        """


def tabulated(factor: Factor, steps: int) -> Array:
    """The factors of a user's function for all steps, of shape (steps,), float64.

    ConfigError: a factor is no number, negative or not finite, or cannot be computed.
    """
    found = np.empty(steps)
    for step in range(steps):
        try:
            found[step] = value = factor(step)
        except Exception as error:  # user code may raise anything
            raise ConfigError(
                f"schedule: the function fails at step {step}: {words(error)}; it "
                "takes the step's number, or with optimizer= of torch that optimiser, of which it "
                "makes one of torch.optim.lr_scheduler"
            ) from error
        if not 0.0 <= found[step] < math.inf:
            raise ConfigError(
                f"schedule: the function gives {value} at step {step}; a factor is a finite "
                "number from 0 on"
            )
    return found
