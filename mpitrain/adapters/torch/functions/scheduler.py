"""Schedulers of torch: evaluated for all steps before the first, or led by tests."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from collectives.errors import words
from mpitrain.adapters.torch.functions.optimizer import TorchOptimizer
from mpitrain.config import ConfigError
from mpitrain.optim.schedule_table import ScheduleTable, TabulatedSchedule, tabulated

_NO_VALUES = "rates are known before training, and so the parameters have no values there"


class TorchSchedule(TabulatedSchedule):
    """The schedule of a function that makes a scheduler of an optimiser, or a factor of a step.

    The scheduler works on an optimiser of the same kind with parameters of its own, so that the
    program's stays as it is.  It takes a step after each training step (or epoch), as in a loop of
    torch.  The options that it writes into the groups, such as rate, momentum or betas, are the
    trainer's options in that step.  ReduceLROnPlateau takes a step after each test.
    """

    def __init__(self, function: Callable[[Any], Any], groups: Sequence[TorchOptimizer]) -> None:
        self._function = function
        self._groups = groups
        self._optimizer: torch.optim.Optimizer
        self._plateau: ReduceLROnPlateau

    def table(self, rows: int) -> ScheduleTable:
        """The factors of all steps or epochs; a column for each group, or one for all.

        Raises:
            ConfigError: the function gives neither, or a scheduler that ends before training, gives
                invalid rates, or begins a momentum that the optimiser does not have.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the order of calls
            found, why = self._made()
            if not isinstance(found, LRScheduler):
                return self._of_steps(rows, why)
            if isinstance(found, ReduceLROnPlateau):
                table = self._table(_written(found, self._optimizer, 1))
                self._plateau = found
                return replace(
                    table, factors=np.repeat(table.factors, rows, axis=0), follows=found.mode
                )
            every = _written(found, self._optimizer, rows)
        return self._table(every)

    def after_tests(self, values: Sequence[float], *, anew: bool) -> list[float]:
        if anew:
            self._plateau, _ = self._made()
        for value in values:
            try:
                self._plateau.step(value)
            except Exception as error:  # a subclass may raise anything
                raise ConfigError(
                    f"schedule: {type(self._plateau).__name__} fails after a test that measured "
                    f"{value}: {words(error)}"
                ) from error
        written = _written(self._plateau, self._optimizer, 1)
        table = self._table(written)
        if changed := sorted({name for own in table.options or () for name in own}):
            raise ConfigError(
                f"schedule: {type(self._plateau).__name__} follows tests and changes "
                f"{', '.join(changed)}; let it change the rate alone"
            )
        return [float(factor) for factor in table.factors[0]]

    def _made(self) -> tuple[Any, str]:
        """The function's result for a new optimiser, and a verb phrase that says which it is."""
        self._optimizer = self._groups[0].over(self._groups)
        try:
            found = self._function(self._optimizer)
        except Exception as error:  # user code may raise anything
            return None, f"fails: {words(error)}; {_NO_VALUES}"
        if getattr(found, "optimizer", self._optimizer) is not self._optimizer:
            raise ConfigError(
                "schedule: the scheduler belongs to another optimiser; make it of the one that the "
                "function is called with"
            )
        return found, f"gives a {type(found).__name__}"

    def _of_steps(self, rows: int, why: str) -> ScheduleTable:
        try:
            return ScheduleTable(tabulated(self._function, rows)[:, None])
        except ConfigError as error:
            if isinstance(error.__cause__, (AttributeError, TypeError)):  # it takes no step
                raise ConfigError(f"schedule: called with the optimiser, it {why}") from error
            raise ConfigError(f"{error} (called with the optimiser, it {why})") from error

    def _table(self, every: Sequence[Sequence[Mapping[str, Any]]]) -> ScheduleTable:
        first = self._groups[0].lr
        factors = np.array([[float(group["lr"]) / first for group in row] for row in every])
        if len(wrong := np.argwhere(~(np.isfinite(factors) & (factors >= 0)))):
            row, number = wrong[0].tolist()
            raise ConfigError(
                f"schedule: the rate of group {number} is {every[row][number]['lr']} at step "
                f"{row}; a rate is a finite number from 0 on"
            )
        options = []
        for number, own in enumerate(self._groups):
            columns = {name: [row[number][name] for row in every] for name in own.options}
            changed = {
                name: values
                for name, values in columns.items()
                if name != "lr" and any(value != own.options[name] for value in values)
            }
            options.append(changed)
        return ScheduleTable(factors, 1, options)


def _written(
    scheduler: Any, optimizer: torch.optim.Optimizer, rows: int
) -> list[list[dict[str, Any]]]:
    """The options of each group in each row."""
    found = []
    for row in range(rows):
        try:
            if row:
                optimizer.step()  # without gradients: it does nothing, and schedulers ask for it
                scheduler.step()
            found.append([{**g, "lr": float(g["lr"])} for g in optimizer.param_groups])
        except Exception as error:  # a scheduler may have an end
            raise ConfigError(
                f"schedule: {type(scheduler).__name__} has no value for step {row} of {rows}: "
                f"{words(error)}; {_NO_VALUES}"
            ) from error
    return found
