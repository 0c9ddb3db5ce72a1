"""Several runs in one table: what they were told differently, and how they ended."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def compare(folder: Path) -> str:
    """A table of the runs in a folder, the best test loss first.

    Raises:
        ValueError: there is no run.
    """
    runs = {path.parent.name: _read(path) for path in sorted(folder.glob("*/metrics.jsonl"))}
    if not runs:
        raise ValueError(f"{folder} has no runs: folders with a metrics.jsonl")
    settings = {name: _flat(records["start"]["config"]) for name, records in runs.items()}
    keys = {key for own in settings.values() for key in own} - {"run.dir"}
    differing = sorted(k for k in keys if len({str(s.get(k)) for s in settings.values()}) > 1)
    table = Table(box=None)
    for column in ("run", *differing, "steps", "loss", "test loss", "test accuracy", "samples/s"):
        table.add_column(column)
    ended = float("inf")
    for name in sorted(runs, key=lambda n: runs[n].get("summary", {}).get("test_loss", ended)):
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
    return capture.get()


def _read(path: Path) -> dict[str, Any]:
    """The last record of each kind."""
    found: dict[str, Any] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
            found[record["event"]] = record
        except (ValueError, KeyError, TypeError):
            continue  # a run that was killed while it wrote
    if "start" not in found:
        raise ValueError(f"{path} has no start of a run")
    return found


def _flat(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{key}": v for table, keys in config.items() for key, v in keys.items()}
