"""The best test so far, the end of training by tests, and rates that follow them."""

from collections.abc import Collection, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from mpitrain.config import Config, ConfigError
from mpitrain.config.metric_names import is_better_higher
from mpitrain.metrics.records import Epoch
from mpitrain.metrics.words import counted
from mpitrain.optim.schedule_table import ScheduleTable, TabulatedSchedule
from mpitrain.ranks.together import by_rank_0

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts

Counted = Annotated[int, Meta(ge=0, le=2**53)]


class Seen(Struct, frozen=True, forbid_unknown_fields=True):
    """The best test so far, judged by one of the values that tests measure.

    Attributes:
        value: value of the best test; None: no test had a finite value.
        step: number of the step before the best test.
        since: tests after the best one.
    """

    value: float | None = None
    step: Counted = 0
    since: Counted = 0


class Watch:
    """Compares each test with the best one before it.

    The values to compare are those that ``checkpoint.best`` and ``evaluate.watch`` name.

    Attributes:
        seen: the best test by each of these values; keys are the job's words for them.
        tested: number of steps before the last test.
    """

    def __init__(self, config: Config, metrics: Collection[str]) -> None:
        """``metrics``: names of the values that tests measure besides the loss.

        ConfigError: a value is not measured, or nothing says whether a higher one is better.
        """
        best, evaluate = config.checkpoint.best, config.evaluate
        self._best, self._watched, self._patience = best, evaluate.watch, evaluate.patience
        self._read: dict[str, tuple[str, bool]] = {}
        if best:
            self._read[best] = _read("checkpoint.best", best, metrics)
        if evaluate.patience:
            self._read[evaluate.watch] = _read("evaluate.watch", evaluate.watch, metrics)
        self.seen = dict.fromkeys(self._read, Seen())
        self.tested = 0

    def note(self, test: Epoch, step: int, *, counts: bool = True) -> None:
        """Note a test after ``step`` steps; a test whose value is not finite is never the best.

        ``counts``: whether a longer run has the test, too; if not, patience ignores it.
        """
        self.tested = step
        measured = {**test.metrics, "loss": test.test_loss}
        for text, (name, higher) in self._read.items():
            before, value = self.seen[text], measured[name]
            is_better = before.value is None or (
                value > before.value if higher else value < before.value
            )
            if isfinite(value) and is_better and (counts or text == self._best):
                self.seen[text] = Seen(value, step)
            elif counts:
                self.seen[text] = Seen(before.value, before.step, before.since + 1)

    def is_best(self) -> bool:
        """Whether the last test is the best one, by ``checkpoint.best``."""
        best = self.seen.get(self._best)
        return best is not None and best.value is not None and best.step == self.tested

    def ended(self) -> str:
        """The reason for which training ends before its last step; empty: it goes on."""
        seen = self.seen.get(self._watched)
        if seen is None or not self._patience or seen.since < self._patience:
            return ""
        tests = counted(seen.since, "test")
        if seen.value is None:
            return f"no finite {self._watched} in {tests}"
        return f"no better {self._watched} in {tests} than {seen.value:.6g} after step {seen.step}"


def watched(key: str, text: str, metrics: Collection[str]) -> tuple[str, bool | None]:
    """The name of a value, and whether a higher one is better; ``None``: nothing says so.

    ``key`` of the job has the value ``text``, as ``"loss"`` or ``"higher score"``; ``metrics`` are
    measured besides the loss.  ConfigError: no test measures it.
    """
    word, _, rest = text.partition(" ")
    name = rest if word in ("higher", "lower") else text
    if name not in ("loss", *metrics):
        raise ConfigError(
            f"{key}: no test measures {name!r}; there are {', '.join(('loss', *metrics))}"
        )
    return name, word == "higher" if name == rest else is_better_higher(name)


def _read(key: str, text: str, metrics: Collection[str]) -> tuple[str, bool]:
    """The name of a value, and whether a higher one is better, which must be known."""
    name, higher = watched(key, text, metrics)
    if higher is None:
        raise ConfigError(
            f"{key}: nothing says whether a higher {name} is better; write 'higher {name}' or "
            f"'lower {name}'"
        )
    return name, higher


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

        ConfigError: no test measures ``evaluate.watch``, or the scheduler takes a better value for
        a worse one.
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

    def resume(self, step: int) -> None:
        """Set the rates as after tests that measured ``values``; collective; errors of note()."""
        values, self.values = self.values, []
        self._follow(values, step, anew=True)

    def _follow(self, values: Sequence[float | None], step: int, *, anew: bool) -> None:
        found = [value if value is not None and isfinite(value) else None for value in values]
        self.values += found

        def act() -> list[float]:
            taken = [nan if value is None else value for value in found]
            return self._schedule.after_tests(taken, anew=anew)

        factors = by_rank_0(self._comm, act, ConfigError)
        self._table.factors[self._table.row(step) :] = factors


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
