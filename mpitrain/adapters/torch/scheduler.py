"""Schedulers of torch, evaluated for all steps before the first."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from collectives.errors import words
from mpitrain.adapters.torch.optimizer import TorchOptimizer
from mpitrain.config import ConfigError
from mpitrain.optim.schedule_table import ScheduleTable, TabulatedSchedule, tabulated


class TorchSchedule(TabulatedSchedule):
    """The schedule of a function that makes a scheduler of an optimiser, or a factor of a step.

    The scheduler works on an optimiser of the same kind with parameters of its own, so that the
    program's stays as it is.  It takes a step after each training step (or epoch), as in a loop of
    torch.  The options that it writes into the groups, such as rate, momentum or betas, are the
    trainer's options in that step.
    """

    def __init__(self, function: Callable[[Any], Any], groups: Sequence[TorchOptimizer]) -> None:
        self._function = function
        self._groups = groups

    def table(self, rows: int) -> ScheduleTable:
        """The factors of all steps or epochs; a column for each group, or one for all.

        Raises:
            ConfigError: the function gives neither, or a scheduler that ends before training, gives
                invalid rates, depends on measurements, or begins a momentum that the optimiser does
                not have.
        """
        optimizer = self._groups[0].over(self._groups)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the order of calls
            try:
                found = self._function(optimizer)
                why = f"gives a {type(found).__name__}"
            except Exception as error:  # user code may raise anything
                found, why = None, f"fails: {words(error)}"
            if not isinstance(found, LRScheduler):
                return self._of_steps(rows, why)
            _expect_known(found, optimizer)
            every = _written(found, optimizer, rows)
        return self._table(every)

    def _of_steps(self, rows: int, why: str) -> ScheduleTable:
        try:
            return ScheduleTable(tabulated(self._function, rows)[:, None])
        except ConfigError as error:
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
            _expect_the_same_state(own, changed)
            options.append(changed)
        return ScheduleTable(factors, 1, options)


def _expect_known(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "schedule: ReduceLROnPlateau follows what tests measure, and the rates of all steps "
            "are known before the first one; take evaluate.patience, which ends training there, "
            "and another scheduler"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "schedule: the scheduler belongs to another optimiser; make it of the one that the "
            "function is called with"
        )


def _written(
    scheduler: Any, optimizer: torch.optim.Optimizer, rows: int
) -> list[list[dict[str, Any]]]:
    """The options of each group in each row."""
    found = []
    for row in range(rows):
        if row:
            optimizer.step()  # without gradients: it does nothing, and schedulers ask for it
            try:
                scheduler.step()
            except Exception as error:  # a scheduler may have an end
                raise ConfigError(
                    f"schedule: {type(scheduler).__name__} has no value for step {row} of {rows}: "
                    f"{words(error)}"
                ) from error
        found.append(
            [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        )
    return found


def _expect_the_same_state(own: TorchOptimizer, changed: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a momentum that is 0 at times: the optimiser has no state then."""
    tried: set[tuple[bool, ...]] = set()
    for row in zip(*changed.values(), strict=True):
        pattern = tuple(
            bool(part)
            for value in row
            for part in (value if isinstance(value, tuple) else (value,))
        )
        if pattern in tried:
            continue
        tried.add(pattern)
        values = dict(zip(changed, row, strict=True))
        if TorchOptimizer(own.over([own]), {**own.options, **values}).slots != own.slots:
            raise ConfigError(
                f"schedule: it changes {', '.join(changed)} between 0, with which the optimiser "
                f"keeps less, and more; make it with {', '.join(changed)} above 0 throughout"
            )
