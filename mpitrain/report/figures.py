"""Figures of the report as SVG, in the page's font and colours; phones scroll them sideways.

matplotlib draws with stand-ins for colours, which become CSS variables: dark mode changes them.
"""

import math
import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from collectives.errors import needed
from mpitrain.metrics.records import Epoch, Step
from mpitrain.metrics.trace import Span
from mpitrain.metrics.words import is_share, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that stand in for CSS variables while matplotlib draws.
_NAMES = (
    "ink", "faint", "train", "test", "wait", "forward", "backward", "input", "weight", "page",
    "comm", "read",
)  # fmt: skip
COLOURS = {name: f"#0101{number:02x}" for number, name in enumerate(_NAMES, 1)}
COLOURS |= {f"series{number}": f"#0102{number:02x}" for number in range(12)}
_PASSES = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
_LABELS = {
    "wait": "waiting", "input": "backward, by the input", "weight": "backward, by the weights",
}  # fmt: skip
_PASS = re.compile(r"([FBIW])(\d+)")
#: Width in CSS pixels.
_WIDTH = 940
#: A curve has at most this many points; each is the mean of some steps.
_POINTS = 300

Draw = Callable[["Figure"], None]


def losses(steps: Sequence[Step], tests: Sequence[tuple[int, Epoch]]) -> str:
    """Loss in training and in tests, and the first metric of the tests, by step."""

    def draw(figure: "Figure") -> None:
        first, second = _panels(figure, 1, (3, 2))
        title(first, "loss")
        _curve(first, [(step.step, step.loss) for step in steps], "train", "training")
        _curve(first, [(step, test.test_loss) for step, test in tests], "test", "test", dots=True)
        _scale(first, [step.loss for step in steps] + [test.test_loss for _, test in tests])
        _legend(first)
        name = next(iter(tests[-1][1].metrics), "") if tests else ""
        percent = 100 if is_share(name) else 1
        points = [(n, percent * one.metrics[name]) for n, one in tests if name in one.metrics]
        _curve(second, points, "test", dots=True)
        if points:
            title(second, f"{name} in tests: {shown(name, points[-1][1] / percent)}")
        else:
            title(second, "tests")
            second.text(0.5, 0.5, "no test", transform=second.transAxes, ha="center")

    return svg(draw, 280)


def details(steps: Sequence[Step]) -> str:
    """Gradient norm, learning rate, throughput, and the time of a step with its parts."""

    def draw(figure: "Figure") -> None:
        panels = _panels(figure, 2, (1, 1))
        for axes, (key, name) in zip(
            panels,
            [
                ("grad_norm", "gradient norm"),
                ("lr", "learning rate"),
                ("samples_per_s", "samples/s"),
            ],
        ):
            points = [(step.step, getattr(step, key)) for step in steps]
            _curve(axes, points, "train")
            title(axes, name)
            if key == "grad_norm":
                _scale(axes, [value for _, value in points])
            elif any(math.isfinite(value) for _, value in points):
                axes.set_ylim(bottom=0)
        _time(panels[3], steps)

    return svg(draw, 480)


def _time(axes: "Axes", steps: Sequence[Step]) -> None:
    title(axes, "ms a step")
    lower: list[float] = []
    for name, share, label in (
        ("comm", lambda s: s.comm_share, "reduction"),
        ("wait", lambda s: s.wait_share, "waiting"),
        ("read", lambda s: s.read_share, "reading"),
        ("train", lambda s: 1 - s.comm_share - s.wait_share - s.read_share, "computing"),
    ):
        means = _binned([(s.step, 1e3 * s.seconds * max(0.0, share(s))) for s in steps])
        x, part = [point[0] for point in means], [point[1] for point in means]
        lower = lower or [0.0] * len(part)
        upper = [a + b for a, b in zip(lower, part, strict=True)]
        axes.fill_between(x, lower, upper, color=COLOURS[name], lw=0, label=label)
        lower = upper
    axes.set_ylim(bottom=0)
    _legend(axes)


def gantt(spans: Sequence[Span]) -> str:
    """Passes of the last step and the waits between them, a row for each rank."""
    last = _last_step(spans)
    ranks = sorted({span.rank for span in last})
    if not ranks:
        return "<p>The trace has no passes.</p>"
    zero = min(span.start for span in last)
    length = 1e3 * (max(span.stop for span in last) - zero) or 1.0

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        shown: set[str] = set()
        for span in last:
            row, width = ranks.index(span.rank), 1e3 * (span.stop - span.start)
            left = 1e3 * (span.start - zero)
            found = _PASS.fullmatch(span.name)
            name = _PASSES[found[1]] if found else "wait"
            label = None if name in shown else _LABELS.get(name, name)
            shown.add(name)
            axes.barh(
                row, width, left=left, height=0.8 if found else 0.3, color=COLOURS[name],
                edgecolor=COLOURS["page"], lw=0.5, label=label,
            )  # fmt: skip
            room = width / length * _WIDTH
            if found and room > 8 * len(found[2]) + 4:
                axes.text(
                    left + width / 2, row, found[2], ha="center", va="center", color=COLOURS["page"]
                )
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        axes.invert_yaxis()
        axes.set_xlim(0, length)
        axes.set_xlabel("ms")
        bare(axes)
        axes.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)

    return svg(draw, 110 + 30 * len(ranks))


def _last_step(spans: Sequence[Span]) -> list[Span]:
    """Passes and waits between each rank's last two updates."""
    found = []
    for rank in {span.rank for span in spans}:
        own = sorted((s for s in spans if s.rank == rank), key=lambda s: s.start)
        updates = [s.start for s in own if s.category == "update"]
        first = updates[-2] if len(updates) > 1 else float("-inf")
        stop = updates[-1] if updates else float("inf")
        found += [
            s
            for s in own
            if (_PASS.fullmatch(s.name) or s.category in ("wait", "communicate"))
            and first <= s.start < stop
            and not s.name.startswith(("send", "publish"))
        ]
    return found


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float, float, float]]:
    """(x, mean, least, most) of groups of neighbouring points, at most ``_POINTS`` groups."""
    width = max(1, -(-len(points) // _POINTS))
    found = []
    for start in range(0, len(points), width):
        some = points[start : start + width]
        y = [value for _, value in some]
        mean = sum(y) / len(y)
        found.append((sum(x for x, _ in some) / len(some), mean, min(y), max(y)))
    return found


def _curve(
    axes: "Axes",
    points: Sequence[tuple[float, float]],
    name: str,
    label: str | None = None,
    *,
    dots: bool = False,
) -> None:
    if not points:
        return
    x, mean, least, most = zip(*_binned(points), strict=True)
    colour = COLOURS[name]
    if len(mean) < len(points):
        axes.fill_between(x, least, most, color=colour, alpha=0.25, lw=0)
    few = len(mean) <= 40
    style: dict[str, Any] = {"marker": "o", "ms": 3} if few and (dots or len(mean) == 1) else {}
    axes.plot(x, mean, lw=1.5, color=colour, label=label, **style)


def _scale(axes: "Axes", values: Sequence[float]) -> None:
    """Makes the scale logarithmic if values are positive and span a factor of ten."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) >= 10 * min(finite):
        from matplotlib.ticker import LogLocator, StrMethodFormatter

        axes.set_yscale("log")
        decades = math.log10(max(finite) / min(finite))
        parts = (1.0,) if decades > 2.5 else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=parts, numticks=12))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()


def _panels(figure: "Figure", rows: int, widths: tuple[int, int]) -> list["Axes"]:
    """Rows of two panels over the steps."""
    ratios = {"width_ratios": widths}
    found = figure.subplots(rows, 2, sharex=True, gridspec_kw=ratios).ravel()
    from matplotlib.ticker import MaxNLocator

    for axes in found:
        bare(axes)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
        axes.grid(axis="y", color=COLOURS["faint"], alpha=0.3, lw=0.6)
    for axes in found[-2:]:
        axes.set_xlabel("step")
    return list(found)


def title(axes: "Axes", name: str) -> None:
    axes.set_title(name, loc="left", size="medium", color=COLOURS["ink"], weight="bold")


def _legend(axes: "Axes") -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 0.99), ncols=3, frameon=False, borderpad=0,
        handlelength=1.2, columnspacing=1.0,
    )  # fmt: skip


def bare(axes: "Axes") -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["faint"])
    axes.tick_params(color=COLOURS["faint"], labelcolor=COLOURS["ink"], length=3)
    axes.xaxis.label.set_color(COLOURS["ink"])


def svg(draw: Draw, height: int) -> str:
    """A figure of this height in CSS pixels; ``ImportError`` without matplotlib."""
    rc_context = needed("matplotlib", "plot", "a report").rc_context
    from matplotlib.figure import Figure

    out = StringIO()
    # A point is 4/3 CSS pixels; the figure's width in points is the page's in pixels.
    with rc_context(
        {"svg.fonttype": "none", "font.size": 13, "text.color": COLOURS["ink"],
         "svg.hashsalt": draw.__qualname__, "axes.formatter.useoffset": False}
    ):  # fmt: skip
        figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
        draw(figure)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    # The font is the page's; older versions of matplotlib write it in one property.
    text = re.sub(r"font: (?:\w+ )?([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    for name, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{name})")
    return f'<div class="scroll">{text}</div>'
