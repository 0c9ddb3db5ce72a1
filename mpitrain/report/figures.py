"""The report's figures, as SVG."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from mpitrain.pipeline.draw import COLOURS
from mpitrain.trace import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CATEGORIES = {
    "compute": "#4c78a8",
    "communicate": "#e45756",
    "wait": "#bab0ac",
    "update": "#54a24b",
    "checkpoint": "#b279a2",
}
_PASS = re.compile(r"[FBIW]\d+")


def curves(steps: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> str:
    """Loss, gradient norm, learning rate and throughput by step."""
    figure = _figure(11, 5.5)
    axes = figure.subplots(2, 2, sharex=True).ravel()
    x = [step["step"] for step in steps]
    for axis, (key, name) in zip(
        axes,
        [
            ("loss", "loss"),
            ("grad_norm", "gradient norm"),
            ("lr", "learning rate"),
            ("samples_per_s", "samples/s"),
        ],
        strict=True,
    ):
        axis.plot(x, [step[key] for step in steps], lw=1, color="#4c78a8")
        axis.set_title(name, loc="left", size=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0 if key != "loss" else None)
    for record in records:
        if record["event"] in ("saved", "resumed"):
            colour = "#54a24b" if record["event"] == "saved" else "#e45756"
            axes[0].axvline(record["step"], lw=0.5, color=colour, alpha=0.6)
    for axis in axes[2:]:
        axis.set_xlabel("step")
    return _svg(figure)


def time_split(steps: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of each step, and the part of them in communication."""
    figure = _figure(11, 2.4)
    axis = figure.subplots()
    x = [step["step"] for step in steps]
    whole = [1e3 * step["seconds"] for step in steps]
    part = [1e3 * step["seconds"] * step["comm_share"] for step in steps]
    axis.fill_between(x, whole, color=_CATEGORIES["compute"], lw=0, label="computing")
    axis.fill_between(x, part, color=_CATEGORIES["communicate"], lw=0, label="communicating")
    axis.set_ylabel("ms a step")
    axis.set_xlabel("step")
    axis.legend(frameon=False, loc="upper right")
    axis.spines[["top", "right"]].set_visible(False)
    return _svg(figure)


def rank_times(spans: Sequence[Span]) -> str:
    """What part of the traced time each rank spent on what."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        totals[span.rank][span.category] += span.stop - span.start
    length = max((span.stop for span in spans), default=1.0) - min(
        (span.start for span in spans), default=0.0
    )
    figure = _figure(11, 0.9 + 0.32 * len(totals))
    axis = figure.subplots()
    for rank in sorted(totals):
        left = 0.0
        for name, colour in _CATEGORIES.items():
            share = 100 * totals[rank][name] / length
            axis.barh(rank, share, left=left, color=colour, height=0.8)
            left += share
    for name, colour in _CATEGORIES.items():
        axis.barh(0, 0, color=colour, label=name)
    axis.set_yticks(sorted(totals), [f"rank {rank}" for rank in sorted(totals)])
    axis.invert_yaxis()
    axis.set_xlabel("% of the traced time")
    axis.legend(frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    axis.spines[["top", "right"]].set_visible(False)
    return _svg(figure)


def gantt(spans: Sequence[Span]) -> str:
    """The passes of the last step, a row for each rank, as the run had them."""
    last = _last_step(spans)
    ranks = sorted({span.rank for span in last})
    if not ranks:
        return "<p>none</p>"
    zero = min(span.start for span in last)
    end = max(span.stop for span in last) - zero
    figure = _figure(11, 0.9 + 0.4 * len(ranks))
    axis = figure.subplots()
    for span in last:
        row, width = ranks.index(span.rank), 1e3 * (span.stop - span.start)
        left = 1e3 * (span.start - zero)
        colour = COLOURS[span.name[0]]
        axis.barh(row, width, left=left, height=0.86, color=colour, edgecolor="white", lw=0.4)
        if width > 0.012 * 1e3 * end:
            centre = left + width / 2
            axis.text(centre, row, span.name[1:], ha="center", va="center", size=6.5, color="white")
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.spines[["top", "right", "left"]].set_visible(False)
    return _svg(figure)


def _last_step(spans: Sequence[Span]) -> list[Span]:
    """Passes between each rank's last two updates."""
    found = []
    for rank in {span.rank for span in spans}:
        own = sorted((s for s in spans if s.rank == rank), key=lambda s: s.start)
        updates = [s.start for s in own if s.category == "update"]
        first = updates[-2] if len(updates) > 1 else float("-inf")
        stop = updates[-1] if updates else float("inf")
        found += [s for s in own if _PASS.fullmatch(s.name) and first < s.start < stop]
    return found


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a report needs matplotlib: pip install 'mpitrain[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: "Figure") -> str:
    out = StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
