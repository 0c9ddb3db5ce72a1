"""Search for a learning rate: a short run whose rate grows step by step (Smith 2017)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from collectives import Communicator
from mpitrain.config import Config, ConfigError, Evaluate
from mpitrain.metrics.records import Step
from mpitrain.optim.schedule_table import Factor
from mpitrain.training.loop import Loop
from mpitrain.update.agreement import NonFinite

#: Weight of the smoothed loss in its next value; the rest is the weight of the step's loss.
_KEPT = 0.9
#: The run ends when the smoothed loss is above its least value by this many times its size.
_DIVERGED = 3.0


@dataclass(frozen=True)
class Tried:
    """A step of the run.

    Attributes:
        lr: value of ``optim.lr`` in this step.
        loss: mean over the batch, before the step's update.
        smoothed: exponential moving average of the losses up to this one.
    """

    lr: float
    loss: float
    smoothed: float


@dataclass(frozen=True)
class RangeTest:
    """Result of the run.

    Attributes:
        tried: steps of the run.
        why: reason for which the run ended.
    """

    tried: Sequence[Tried]
    why: str

    @property
    def steepest(self) -> float | None:
        """The rate in the middle of the tenth of the steps in which the smoothed loss falls most.

        A tenth, because the fall from one step to the next is due to chance.  Steps after the least
        loss do not count.
        """
        if not self.tried:
            return None
        least = self.tried.index(self._least())
        width = min(max(1, len(self.tried) // 10), least)
        falls = [
            (self.tried[first + width].smoothed - self.tried[first].smoothed, first)
            for first in range(least - width + 1)
        ]
        fall, first = min(falls)
        return self.tried[first + width // 2].lr if fall < 0.0 else None

    @property
    def tenth(self) -> float | None:
        """A tenth of the rate at which the smoothed loss is least."""
        return self._least().lr / 10 if self.steepest is not None else None

    def _least(self) -> Tried:
        return min(self.tried, key=lambda one: one.smoothed)


def find(
    comm: Communicator, config: Config, make: Callable[[Communicator, Config, Factor], Loop], *,
    least: float, most: float, steps: int,
) -> RangeTest:  # fmt: skip
    """Train from the initial weights with ``optim.lr`` growing from ``least`` to ``most``.

    Each step's rate is the same multiple of the one before.  Nothing is written.  Collective.

    Args:
        comm: the ranks, in the job's layout.
        config: the job; its schedule, warm-up and number of steps are not used.
        make: ``make(comm, job, factor)`` makes the loop of a job whose rate in a step is
            ``factor(step)`` times ``optim.lr``.
        least, most: the first and the last value of ``optim.lr``.
        steps: number of steps.

    Raises:
        ConfigError: as :func:`mpitrain.start.start`; or there are fewer than 2 steps, or ``most``
            is not greater than ``least``.
    """
    if not 0 < least < most < inf or steps < 2:
        raise ConfigError(
            f"find-lr tries 2 steps or more from a rate above 0 to a higher one, not {steps} from "
            f"{least:g} to {most:g}"
        )
    parts = [step / (steps - 1) for step in range(steps)]
    values = [least ** (1 - part) * most**part for part in parts]  # most / least may be too large
    with make(comm, shortened(config, steps), lambda step: values[step] / config.optim.lr) as loop:
        tried, why = _run(loop, values)
    return RangeTest(tried, why)


def shortened(config: Config, steps: int) -> Config:
    """The job with this number of steps, a rate that a function gives, and no averages."""
    return replace(
        config,
        run=replace(config.run, on_nonfinite="stop", check_every=0, shadow=0),
        optim=config.optim.constant,
        evaluate=Evaluate(config.evaluate.metrics),  # a scheduler that follows tests is replaced
        # As an epoch has at least one step, this number of epochs is enough.
        train=replace(config.train, epochs=steps, steps=steps),
    )


def _run(loop: Loop, values: Sequence[float]) -> tuple[list[Tried], str]:
    parts, tried = loop.parts, list[Tried]()
    total = weight = 0.0
    try:
        while parts.steps_done < parts.total_steps:
            for record in loop.run_epoch(parts.epoch):
                if not isinstance(record, Step):
                    continue  # the loss scale was too large
                total = _KEPT * total + (1.0 - _KEPT) * record.loss
                weight = _KEPT * weight + (1.0 - _KEPT)
                tried.append(Tried(values[record.step - 1], record.loss, total / weight))
                least = min(one.smoothed for one in tried)
                if tried[-1].smoothed > least + _DIVERGED * abs(least):
                    times = f"{_DIVERGED:g} times its size"
                    return tried, f"the loss was above its least by more than {times}"
    except NonFinite as error:
        return tried, str(error).partition(";")[0]
    return tried, "all steps were done"
