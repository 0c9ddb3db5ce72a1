"""Report of a run in one HTML file, without network and scripts: result, time, details."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from collectives.files import replace
from mpitrain.config import by_key
from mpitrain.metrics.reader import Log, read_records
from mpitrain.metrics.records import Back, Resumed, Saved, Skipped, Start, Step, Straggler, Times
from mpitrain.metrics.trace import TRACE_FILE, Span, read_trace
from mpitrain.metrics.words import counted, in_words, measured, summed
from mpitrain.report import facts, figures

STYLE = files("mpitrain.report").joinpath("pages/style.css").read_text(encoding="utf-8")
#: Ranks whose time is shown without a click.
_RANKS = 16

#: Parts of a rank's time: attribute of :class:`facts.Rank`, and class in the style sheet.
_PARTS = {"computing": "c", "reduction": "s", "waiting": "w"}

Row = tuple[str, object]


@dataclass(frozen=True)
class _Html:
    """Text with tags."""

    html: str


def write_report(run: Path) -> Path:
    """Writes ``report.html`` into a run's folder; returns its path.

    Raises:
        ValueError: ``metrics.jsonl`` cannot be read or has no step.
        ImportError: matplotlib is not installed.
    """
    log = read_records(run / "metrics.jsonl")
    start, steps = log.start(), log.of(Step)
    if not steps:
        raise ValueError(f"{log.path} has no run with a step in it")
    spans, why = _trace(run / TRACE_FILE, start.ranks)
    times = log.since_start().last(Times)
    ranks = facts.ranks(times.ranks if times else ())
    name = os.fsencode(run.resolve().name).decode("utf-8", "backslashreplace")
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="answer">{escape(facts.answer(log, ranks))}</p>',
        figures.losses(steps, facts.curve(log)),
        _section("Where the time went", _times(ranks)),
        _section("Settings that differ from the defaults", _settings(start)),
        _section("The run", _run(log, ranks)),
        _section("Events", _events(log)),
        _section("More curves", figures.details(steps)),
        *_passes(spans, why),
        _section("Layout", _layout(start)),
        _section("Tests", _tests(log)),
    ]
    title = escape(f"{name}: {start.layout}")
    path = run / "report.html"
    replace(
        path,
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style>{''.join(parts)}</html>",
    )
    return path


def _trace(path: Path, ranks: int) -> tuple[list[Span], str]:
    """Spans of a run's trace, or why it cannot be used."""
    if not path.exists():
        return [], ""
    try:
        spans = read_trace(path)
    except ValueError as error:
        return [], str(error)
    if any(span.rank >= ranks for span in spans):
        return [], f"{path} is of a run on more ranks than this one's {ranks}"
    return spans, ""


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"


def _table(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    cells = "".join(
        f"<tr>{''.join(f'<td>{_text(value)}</td>' for value in row)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table>{f"<tr>{head}</tr>" if head else ""}{cells}</table></div>'


def _text(value: object) -> str:
    return value.html if isinstance(value, _Html) else escape(str(value))


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _times(ranks: Sequence[facts.Rank]) -> str:
    """A bar for each rank, with its waits for others."""
    if not ranks:
        return '<p class="note">A run writes the time of each rank when it ends or is stopped.</p>'
    key = "".join(f'<span><i class="{kind}"></i>{name}</span>' for name, kind in _PARTS.items())
    longest = max(rank.seconds for rank in ranks) or 1.0
    bars = [_bar(number, rank, longest) for number, rank in enumerate(ranks)]
    rest = bars[_RANKS:]
    more = _folded(f"{len(rest)} more ranks", "".join(rest)) if rest else ""
    totals, least = list(facts.waited_for(ranks).items())[:3], 0.05 * sum(r.seconds for r in ranks)
    whom = ", ".join(f"rank {rank} ({facts.duration(s)})" for rank, s in totals if s >= least)
    return (
        f'<div class="key">{key}</div>{"".join(bars[:_RANKS])}{more}'
        + (f"<p>Waited for most, by all ranks together: {whom}.</p>" if whom else "")
        + '<p class="note">Reduction is the sum of gradients, waiting that for activations of '
        "other stages and for the last rank at the end of a step. Ranks leave these together: what "
        "a rank spends in them beyond the rank with the least is waiting for that one.</p>"
    )


def _bar(number: int, rank: facts.Rank, longest: float) -> str:
    parts = "".join(
        f'<i class="{kind}" style="width:{100 * seconds / longest:.2f}%" '
        f'title="{name}: {facts.duration(seconds)}"></i>'
        for name, kind in _PARTS.items()
        if (seconds := getattr(rank, name)) > 0
    )
    others = sorted(rank.waited_for.items(), key=lambda item: -item[1])
    some = [f"{facts.duration(s)} for rank {other}" for other, s in others[:2] if s >= 0.005]
    told = f"waited {' and '.join(some)}" if some else "waited for nobody"
    share = rank.computing / rank.seconds if rank.seconds else 0.0
    return (
        f'<div class="rank"><p><span><b>rank {number}</b> computing {share:.0%}</span>'
        f'<span>{told}</span></p><div class="bar">{parts}</div></div>'
    )


def _settings(start: Start) -> str:
    defaults, others = facts.changed(start.config)
    values = by_key(start.config)
    rows = [(key, _told(values[key], default)) for key, default in defaults.items()]
    body = _table(rows) if rows else "<p>none</p>"
    return body + _folded(f"{len(others)} settings as by default", _table(others.items()))


def _told(value: object, default: object) -> _Html:
    instead = "none" if default in ("", None, [], ()) else default
    return _Html(f'{_text(value)} <span class="note">default {_text(instead)}</span>')


def _run(log: Log, ranks: Sequence[facts.Rank]) -> str:
    start, steps = log.start(), log.of(Step)
    seconds = sum(step.seconds for step in steps)
    rows: list[Row] = [
        ("started", start.date),
        ("software", ", ".join(f"{name} {version}" for name, version in start.software.items())),
        ("ranks", f"{start.ranks} on {facts.where(start)}"),
        *facts.devices(start),
        ("time in steps", facts.duration(seconds)),
        ("samples/s", f"{sum(s.samples for s in steps) / seconds:.0f}" if seconds else ""),
        ("gradients", summed(start.algorithm, start.reason)),
        ("sent", facts.sent(steps)),
        ("workers", facts.synced(steps)),
        ("servers", facts.served(steps)),
        ("memory of a rank", _memory(ranks)),
        ("checkpoints", _checkpoints(log.of(Saved), seconds)),
        ("left out", ", ".join(sorted(set(log.unknown)))),
    ]
    return _table(row for row in rows if row[1])


def _memory(ranks: Sequence[facts.Rank]) -> str:
    most = [rank.memory for rank in ranks]
    if not any(most):
        return ""
    top = max(most)
    return f"at most {in_words(top)} (rank {most.index(top)}), at least {in_words(min(most))}"


def _checkpoints(saved: Sequence[Saved], seconds: float) -> str:
    if not saved:
        return "none"
    total = sum(record.seconds for record in saved)
    share = f", {total / seconds:.1%} of the time in steps" if seconds else ""
    return (
        f"{len(saved)}, {facts.duration(total / len(saved))} each from the decision to the last "
        f"byte{share}; those in the background cost less"
    )


def _events(log: Log) -> str:
    rows: list[Row] = []
    for record in log.records:
        match record:
            case Skipped():
                rows.append((f"step {record.step} skipped", f"not finite: {record.culprits}"))
            case Straggler():
                rows.append(
                    (
                        f"step {record.step} straggler",
                        f"rank {record.rank} on {record.host} took {record.factor:.1f} times as "
                        "long as its peers",
                    )
                )
            case Back():
                rows.append((f"step {record.spike} spike", str(record)))
            case Resumed():
                rows += [("checkpoint refused", why) for why in record.refused]
                rows.append((f"step {record.step} resumed", record.path))
                rows += [(f"step {record.step} resumed", note) for note in record.notes]
    saved = [
        (f"step {record.step}", facts.duration(record.seconds), record.path)
        for record in log.of(Saved)
    ]
    body = _table(rows) if rows else "<p>Nothing unusual.</p>"
    return body + (_folded(counted(len(saved), "checkpoint"), _table(saved)) if saved else "")


def _passes(spans: Sequence[Span], why: str) -> list[str]:
    """Timeline; ``why`` if the trace cannot be used, and empty without one."""
    if not spans and not why:
        return []
    left_out = f'<p class="note">Left out: {escape(why)}.</p>'
    return [_section("Passes of the last step", left_out if why else figures.gantt(spans))]


def _layout(start: Start) -> str:
    stages = [(f"stage {i}", ", ".join(names)) for i, names in enumerate(start.stages)]
    return _table([("layout", start.layout), ("parameters", f"{start.parameters:,}"), *stages])


def _tests(log: Log) -> str:
    rows = [
        (test.epoch, step, measured(test.metrics), facts.number(test.test_loss))
        for step, test in facts.curve(log)
    ]
    return _folded(counted(len(rows), "test"), _table(rows, ("epoch", "step", "measured", "loss")))
