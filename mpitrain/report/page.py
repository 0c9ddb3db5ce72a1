"""The report: curves, time, pipeline, layout, configuration and events of a run, in one file."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mpitrain.metrics import read_records
from mpitrain.report import figures
from mpitrain.trace import read_trace

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
table { border-collapse: collapse; } td, th { padding: .15rem .7rem; text-align: left; }
tr:nth-child(even) { background: #8881; } code { font-size: 90%; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #1b1b1b; } }
"""


def write_report(run: Path) -> Path:
    """Write ``report.html`` into a run's folder; returns its path.

    Raises:
        ValueError: the folder has no ``metrics.jsonl`` that can be read.
        ImportError: matplotlib is not installed.
    """
    records, cut_off = read_records(run / "metrics.jsonl")
    starts = [record for record in records if record["event"] == "start"]
    steps = [record for record in records if record["event"] == "step"]
    if not starts or not steps:
        raise ValueError(f"{run / 'metrics.jsonl'} has no run with a step in it")
    start = starts[-1]
    parts = [
        _section("Result", _result(records, steps, cut_off)),
        _section("Curves", figures.curves(steps, records)),
        _section("Time", figures.time_split(steps)),
    ]
    if (run / "trace.json").exists():
        spans = read_trace(run / "trace.json")
        parts.append(_section("Time of each rank", figures.rank_times(spans)))
        parts.append(_section("Pipeline: the last step", figures.gantt(spans)))
    parts += [
        _section("Layout", _layout(start)),
        _section("Events", _events(records)),
        _section("Configuration", _configuration(start["config"])),
    ]
    title = escape(f"{run.name}: {start['layout']}")
    path = run / "report.html"
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{_STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>",
        encoding="utf-8",
    )
    return path


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"


def _table(rows: Sequence[tuple[str, object]]) -> str:
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"


def _result(
    records: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], cut_off: bool
) -> str:
    rows: list[tuple[str, object]] = [
        ("steps", steps[-1]["step"]),
        ("loss of the last", f"{steps[-1]['loss']:.6g}"),
    ]
    for record in records:
        if record["event"] == "summary":
            rows += [
                ("test accuracy", f"{record['test_accuracy']:.2%}"),
                ("test loss", f"{record['test_loss']:.6g}"),
                ("samples/s", f"{record['samples_per_s']:.0f}"),
                ("communication", f"{record['comm_share']:.1%} of step time"),
                ("gradients by", f"{record['algorithm']} ({record['reason']})"),
            ]
    if cut_off:
        rows.append(("cut off", "the last line is not whole: the run was killed while it wrote it"))
    if not any(record["event"] == "summary" for record in records):
        rows.append(("unfinished", "the run has no summary: it goes on, or was stopped"))
    return _table(rows)


def _layout(start: Mapping[str, Any]) -> str:
    rows = [(f"stage {i}", ", ".join(names)) for i, names in enumerate(start["stages"])]
    return _table(
        [
            ("ranks", start["ranks"]),
            ("layout", start["layout"]),
            ("parameters", start["parameters"]),
            *rows,
        ]
    )


def _events(records: Sequence[Mapping[str, Any]]) -> str:
    rows: list[tuple[str, object]] = []
    for record in records:
        match record["event"]:
            case "skipped":
                rows.append((f"step {record['step']} skipped", record["culprits"]))
            case "saved":
                rows.append((f"step {record['step']} saved", record["path"]))
            case "resumed":
                rows += [("refused", why) for why in record["refused"]]
                rows.append((f"resumed after step {record['step']}", record["path"]))
            case "epoch":
                rows.append(
                    (f"epoch {record['epoch']}", f"test accuracy {record['test_accuracy']:.2%}")
                )
    return _table(rows) if rows else "<p>none</p>"


def _configuration(config: Mapping[str, Any]) -> str:
    return _table(
        [(f"{table}.{key}", value) for table, keys in config.items() for key, value in keys.items()]
    )
