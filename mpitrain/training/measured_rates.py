"""Learning rates that follow what tests measure."""

from collections.abc import Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING

from mpitrain.config import ConfigError
from mpitrain.metrics.records import Epoch
from mpitrain.optim.schedule_table import ScheduleTable, TabulatedSchedule
from mpitrain.ranks.together import together
from mpitrain.training.watch import watched

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts


class MeasuredRates:
    """Gives the steps after a test the rates of a scheduler such as torch's ReduceLROnPlateau.

    The scheduler is rank 0's, and all ranks get its rates.  A checkpoint has what tests have
    measured, and a run that goes on takes the scheduler through that again.

    Attributes:
        values: measured values of the tests, in turn; ``None``: a value that is not finite.
        is_led: whether somebody makes the tests.
    """

    is_led = False

    def __init__(self, parts: "Parts", schedule: TabulatedSchedule, table: ScheduleTable) -> None:
        """The rows of ``table``, the rates of ``schedule``, are replaced after tests.

        Raises:
            ConfigError: no test measures ``evaluate.watch``, or the scheduler takes a better value
                for a worse one.
        """
        self._comm, self._schedule, self._table = parts.comm, schedule, table
        self.values: list[float | None] = []
        if parts.data.test is None:
            raise ConfigError(
                "schedule: the scheduler follows tests, and the job has nothing to test on; give "
                "test_data, or another scheduler"
            )
        text = parts.config.evaluate.watch
        self._name, higher = watched("evaluate.watch", text, parts.metrics)
        if higher is not None and higher != (table.follows == "max"):
            better, mode = ("higher", "max") if higher else ("lower", "min")
            raise ConfigError(
                f"schedule: the scheduler has mode = {table.follows!r}, and a {better} "
                f"{self._name}, which evaluate.watch names, is better; make it with mode = "
                f"{mode!r}, or watch another value"
            )

    def expect_led(self) -> None:
        """Raise ConfigError if nobody makes the tests, so that the rates would never change."""
        if not self.is_led:
            raise ConfigError(
                "schedule: the scheduler follows the tests that fit() makes, and a loop of your "
                "own makes none; call fit(), or take another scheduler"
            )

    def note(self, test: Epoch, step: int) -> None:
        """Set the rates from ``step`` on, counted from 0, by a test; collective.

        ConfigError on all ranks: the scheduler fails, or changes more than rates.
        """
        self._follow([{**test.metrics, "loss": test.test_loss}[self._name]], step, anew=False)

    def resume(self, values: Sequence[float | None], step: int) -> None:
        """Set the rates as after tests that measured ``values``; collective; errors of note()."""
        self.values = []
        self._follow(values, step, anew=True)

    def _follow(self, values: Sequence[float | None], step: int, *, anew: bool) -> None:
        found = [value if value is not None and isfinite(value) else None for value in values]
        self.values += found

        def act() -> list[float]:
            if self._comm.rank > 0:
                return []
            taken = [nan if value is None else value for value in found]
            return self._schedule.after_tests(taken, anew=anew)

        factors = self._comm.bcast(together(self._comm, act, ConfigError))
        self._table.factors[step // self._table.steps :] = factors


def measured_rates(parts: "Parts") -> MeasuredRates | None:
    """The rates of a schedule that follows tests, if it does; errors of :class:`MeasuredRates`."""
    table, schedule, evaluate = parts.rates.table, parts.objects.schedule, parts.config.evaluate
    if table and table.follows and isinstance(schedule, TabulatedSchedule):
        return MeasuredRates(parts, schedule, table)
    if schedule is not None and evaluate.watch != "loss" and not evaluate.patience:
        raise ConfigError(
            "evaluate.watch: neither patience nor the schedule reads it; leave it out, or take a "
            "scheduler that follows tests, as torch's ReduceLROnPlateau"
        )
    return None
