"""Runs of one job on several numbers of ranks, and what they say of its scaling."""

import math
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from mpitrain.config import ConfigError
from mpitrain.metrics.reader import Log, read_records
from mpitrain.metrics.records import Epoch, Step
from mpitrain.metrics.words import is_share
from mpitrain.search.on_ranks import on_ranks, output

#: Steps whose mean training loss is compared with a goal.
STEPS = 10


class Goal(NamedTuple):
    """A value that training is to reach: ``loss`` of training, ``test_loss`` or a metric."""

    name: str
    value: float


class Size(NamedTuple):
    """One number of ranks.

    Attributes:
        ranks, workers, batch: all ranks, those that are no servers, and samples of a step.
        step_s: mean seconds of a step.
        samples_per_s: throughput.
        speedup: throughput over that of the fewest workers.
        efficiency: ``speedup`` over how many times as many workers there are.
        serial: share of the work of the fewest workers that more of them do not share, by Amdahl's
            law (Karp & Flatt 1990); nan for these, and where the batch grows.
        hours: of the whole training; nan: its steps are not known.
        steps, epochs, seconds: until the goal; nan: it was not reached.
    """

    ranks: int
    workers: int
    batch: int
    step_s: float
    samples_per_s: float
    speedup: float = 1.0
    efficiency: float = 1.0
    serial: float = math.nan
    hours: float = math.nan
    steps: float = math.nan
    epochs: float = math.nan
    seconds: float = math.nan

    def beside(self, first: "Size") -> "Size":
        """This size with the fewest workers' as the measure."""
        times, speedup = self.workers / first.workers, self.samples_per_s / first.samples_per_s
        is_strong = times > 1 and self.batch == first.batch
        serial = (1 / speedup - 1 / times) / (1 - 1 / times) if is_strong else math.nan
        return self._replace(speedup=speedup, efficiency=speedup / times, serial=serial)


def trained(
    job: str, ranks: int, sets: Sequence[str], folder: Path, virtual: Sequence[str] | None = None
) -> Log:
    """The records of a job on so many ranks, which it writes to ``folder``.

    Args:
        job: the job file, or an example's name.
        ranks: number of ranks, which ``mpiexec`` starts.
        sets: values in the place of the job's, as in ``optim.lr=0.1``.
        folder: the ``run.dir``.
        virtual: further words of ``train --virtual``; None: ranks are real.

    Raises:
        ConfigError: it cannot be trained; the message is its own.
    """
    words = ["mpitrain", "train", job]
    for text in (*sets, f"run.dir={folder}"):
        words += ["--set", text]
    if virtual is None:
        on_ranks(ranks, *words, seconds=math.inf)
    else:
        words += ["--virtual", str(ranks), *virtual]
        output([sys.executable, "-m", *words], f"--virtual {ranks}", math.inf)
    return read_records(folder / "metrics.jsonl")


def measured(log: Log, servers: int = 0) -> Size:
    """The speed of a run; its first step, in which plans are made, does not count."""
    steps = log.of(Step)[1:] or log.of(Step)
    if not steps:
        raise ConfigError(f"{log.path} has no steps: each was skipped")
    seconds, ranks = sum(one.seconds for one in steps), log.start().ranks
    samples, most = sum(one.samples for one in steps), max(one.samples for one in steps)
    return Size(ranks, ranks - servers, most, seconds / len(steps), samples / seconds)


def reached(log: Log, goal: Goal, size: int = 0) -> tuple[float, float, float]:
    """Steps, epochs and seconds of training until a goal; nan if it was not reached.

    ``size``: samples of an epoch; 0: those of the first one, if it is complete.

    Raises:
        ConfigError: tests do not measure it.
    """
    steps, seconds, samples = log.of(Step), 0.0, 0
    first = sum(one.samples for one in steps if not one.epoch)
    whole = size or (first if steps and steps[-1].epoch else math.nan)
    last: deque[float] = deque(maxlen=STEPS)
    step = 0
    for record in log.records:
        value = math.nan
        if isinstance(record, Step):
            seconds, samples = seconds + record.seconds, samples + record.samples
            last.append(record.loss)
            step, value = record.step, fmean(last) if goal.name == "loss" else value
        elif isinstance(record, Epoch) and goal.name != "loss":
            tested = {"test_loss": record.test_loss, **record.metrics}
            if goal.name not in tested:
                raise ConfigError(
                    f"--until {goal.name}: tests measure {', '.join(tested)}; give one of them, or "
                    "loss, which is that of training"
                )
            value = tested[goal.name]
        if value >= goal.value if is_share(goal.name) else value <= goal.value:
            return step, samples / whole, seconds
    return math.nan, math.nan, math.nan
