"""Spikes of the loss, after which all ranks go back to the newest checkpoint."""

from collections import deque
from collections.abc import Callable
from statistics import median

from mpitrain.config.tables import Run
from mpitrain.metrics.records import Back, Resumed, Step
from mpitrain.update.agreement import Diverged


class Spike(Diverged):
    """Losses are far above those before."""


class Spikes:
    """Compares each loss with the median of those before it.

    A loss above ``run.spike_factor`` times the median is left out of later medians, and no
    checkpoint is written until a loss is below.  The last of ``run.spike_steps`` such losses in a
    row raises :class:`Spike`.

    Attributes:
        losses: newest losses that were not far above.
        streak: numbers of the steps, up to the last one, whose losses in a row are far above.
        left_out: numbers of steps, counted from 1, whose batches change nothing.
        times: number of times that all ranks went back.
        back: step of the checkpoint that they went back to last.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.losses = deque[float](maxlen=run.spike_window)
        self.streak, self.times, self.back = list[int](), 0, -1
        self.left_out = set[int]()

    @property
    def kept(self) -> tuple[list[float], list[int], int]:
        """Losses, left-out steps and times, as a checkpoint has them."""
        return [*self.losses], sorted(self.left_out), self.times

    def take(self, losses: list[float], left_out: list[int], times: int) -> None:
        """Go on from what :attr:`kept` gave."""
        self.losses.clear()
        self.losses.extend(losses)
        self.left_out, self.times, self.streak = {*left_out}, times, []

    def see(self, step: Step) -> None:
        """Compare the loss of a step that was taken; Spike: it ends one."""
        run, usual = self._run, median(self.losses) if self.losses else 0.0
        is_compared = len(self.losses) == run.spike_window and usual != 0  # 3 times 0 is 0
        if not is_compared or step.loss <= usual + (run.spike_factor - 1) * abs(usual):
            self.streak = []
            self.losses.append(step.loss)
            return
        self.streak.append(step.step)
        if len(self.streak) >= run.spike_steps:
            raise Spike(
                f"the loss at step {step.step} is {step.loss:.4g}, and the median of the "
                f"{run.spike_window} before is {usual:.4g}",
                step=step.step,
            )

    def go_back(
        self,
        error: Diverged,
        restore: Callable[[int], Resumed | None],
        damaged: type[Exception],
    ) -> Back:
        """Leave batches out from the newest checkpoint on; collective.

        If a spike follows a checkpoint again, take the whole one before it, if any.  ``restore``:
        restores the newest checkpoint before a step, or raises ``damaged`` on all ranks.

        Such an error on all ranks: that has happened ``run.spike_times`` times, or no checkpoint of
        a step before the spike is left.
        """
        run, last = self._run, error.step
        if self.times == run.spike_times:
            raise type(error)(
                f"{error}; run.on_spike went back {self.times} times before; a smaller optim.lr "
                "may help, or a larger run.spike_times",
                step=last,
            ) from error
        first, refused = min([*self.streak, last]), list[str]()
        left_out, times = self.left_out, self.times + 1

        def before(step: int) -> Resumed | None:
            try:
                return restore(step)
            except damaged as found:
                refused.append(str(found))
                return None

        found = before(first)
        if found and found.step == self.back:
            found = before(found.step) or before(first)
        if found is None:
            told = "; ".join([*refused, "set checkpoint.keep to 2 or more"])
            raise type(error)(
                f"{error}; no checkpoint before step {first} is left to go back to; {told}",
                step=last,
            ) from error
        if run.on_spike != "repeat":
            from_ = found.step + 1 if run.on_spike == "skip_all" else first
            left_out = left_out | {*range(from_, last + 1)}
        self.left_out, self.times, self.streak, self.back = left_out, times, [], found.step
        again = sorted(number for number in left_out if number > found.step)
        return Back(found.step, last, str(error), again, times, refused + found.refused)
