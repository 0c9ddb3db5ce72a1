"""Several runs in one table: their differing settings and their results."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpitrain.config import by_key
from mpitrain.metrics.reader import Log, read_records
from mpitrain.metrics.records import Start, Step, Summary
from mpitrain.metrics.words import measured
from mpitrain.pipeline.draw import figure

#: No column is shortened: runs of several jobs differ in many settings.
_WIDTH = 10_000


def compare(folder: Path, plot: Path | None = None) -> str:
    """A table of the runs in a folder, the best test loss first, and why others are not in it.

    ``plot``: a file for a picture of their losses.

    Raises:
        ValueError: there is no run that can be read.
    """
    runs, refused = {}, []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        try:
            log = read_records(path)
            runs[path.parent.name] = (_settings(log.start()), log)
        except ValueError as error:
            refused.append(str(error))
    if not runs:
        raise ValueError("; ".join(refused) or f"{folder} has no runs: folders with metrics.jsonl")
    if plot:
        _draw({name: log.of(Step) for name, (_, log) in runs.items()}, plot)
    keys = {key for settings, _ in runs.values() for key in settings} - {"run.dir"}
    differing = sorted(k for k in keys if len({str(s.get(k)) for s, _ in runs.values()}) > 1)
    table = Table(box=None)
    for column in ("run", *differing, "steps", "loss", "test loss", "metrics", "samples/s"):
        table.add_column(column, no_wrap=True)
    for name in sorted(runs, key=lambda n: _order(runs[n][1])):
        settings, log = runs[name]
        last, summary = log.last(Step), log.summary()
        table.add_row(
            Text(name),
            *(Text(str(settings.get(key, "-"))) for key in differing),
            str(last.step if last else 0),
            f"{last.loss:.4f}" if last else "-",
            _tested(summary) if summary else "unfinished",
            (measured(summary.metrics) if summary else "") or "-",
            f"{summary.samples_per_s:.0f}" if summary else "-",
        )
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(table)
    return capture.get() + "".join(f"left out: {reason}\n" for reason in refused)


def _draw(runs: Mapping[str, Sequence[Step]], path: Path) -> None:
    """Draw the losses of training by step."""
    drawn = figure(figsize=(8, 4.5))
    axes = drawn.subplots()
    for name, steps in runs.items():
        axes.plot([one.step for one in steps], [one.loss for one in steps], label=name)
    axes.set(xlabel="step", ylabel="loss in training")
    axes.legend()
    drawn.savefig(path, dpi=150)


def _settings(start: Start) -> dict[str, Any]:
    """The settings, versions and number of ranks of a run."""
    return {"ranks": start.ranks, **start.software, **by_key(start.config)}


def _tested(summary: Summary) -> str:
    return f"{summary.test_loss:.4f}" if summary.tested else "-"


def _order(log: Log) -> float:
    """The test loss; runs that have none, or one that is not finite, come last."""
    summary = log.summary()
    loss = summary.test_loss if summary else math.inf
    return loss if math.isfinite(loss) else math.inf
