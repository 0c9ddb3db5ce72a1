"""The best test of a run so far, and the number of tests after it."""

from collections.abc import Collection
from math import isfinite
from typing import Annotated

from msgspec import Meta, Struct

from mpitrain.config import Config, ConfigError
from mpitrain.config.metric_names import is_better_higher
from mpitrain.metrics.records import Epoch
from mpitrain.metrics.words import counted

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

        Raises:
            ConfigError: a value is not measured, or it is unknown whether a higher one is better.
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

    def note(self, test: Epoch, step: int) -> None:
        """Note a test after ``step`` steps; a test whose value is not finite is never the best."""
        self.tested = step
        measured = {**test.metrics, "loss": test.test_loss}
        for text, (name, higher) in self._read.items():
            before, value = self.seen[text], measured[name]
            is_better = before.value is None or (
                value > before.value if higher else value < before.value
            )
            if isfinite(value) and is_better:
                self.seen[text] = Seen(value, step)
            else:
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

    Args:
        key: key of the job.
        text: its value, as ``"loss"`` or ``"higher score"``.
        metrics: names of the values that tests measure besides the loss.

    Raises:
        ConfigError: no test measures it.
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
