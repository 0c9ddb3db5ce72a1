"""Several runs in one table: what they were told differently, and how they ended."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mpitrain.metrics import read_records


def compare(folder: Path) -> str:
    """A table of the runs in a folder, the best test loss first, and why others are not in it.

    Raises:
        ValueError: there is no run that can be read.
    """
    runs, refused = {}, []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        try:
            runs[path.parent.name] = _read(path)
        except ValueError as error:
            refused.append(str(error))
    if not runs:
        raise ValueError("; ".join(refused) or f"{folder} has no runs: folders with metrics.jsonl")
    settings = {name: _flat(records["start"]["config"]) for name, records in runs.items()}
    keys = {key for own in settings.values() for key in own} - {"run.dir"}
    differing = sorted(k for k in keys if len({str(s.get(k)) for s in settings.values()}) > 1)
    table = Table(box=None)
    for column in ("run", *differing, "steps", "loss", "test loss", "test accuracy", "samples/s"):
        table.add_column(column)
    for name in sorted(runs, key=lambda n: _order(runs[n])):
        last, summary = runs[name].get("step", {}), runs[name].get("summary")
        table.add_row(
            name,
            *(str(settings[name].get(key)) for key in differing),
            str(last.get("step", 0)),
            f"{last['loss']:.4f}" if last else "-",
            f"{summary['test_loss']:.4f}" if summary else "unfinished",
            f"{summary['test_accuracy']:.2%}" if summary else "-",
            f"{summary['samples_per_s']:.0f}" if summary else "-",
        )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get() + "".join(f"left out: {reason}\n" for reason in refused)


def _read(path: Path) -> dict[str, Any]:
    """The last record of each kind."""
    found = {record["event"]: record for record in read_records(path)[0]}
    if "start" not in found:
        raise ValueError(f"{path} has no start of a run")
    return found


def _order(run: dict[str, Any]) -> float:
    """The test loss; runs that have none, or one that is not finite, come last."""
    loss = float(run["summary"]["test_loss"]) if "summary" in run else math.inf
    return loss if math.isfinite(loss) else math.inf


def _flat(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{key}": v for table, keys in config.items() for key, v in keys.items()}
