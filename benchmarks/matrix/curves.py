"""Losses of several runs against time, as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from mpitrain.report.figures import COLOURS, bare, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours that a page has for curves; the first is the ink.
SERIES = 12


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        label: in the legend.
        colour: below :data:`SERIES`.
        dashed: how it is drawn.
        seconds, losses: its points.
    """

    label: str
    colour: int
    dashed: bool
    seconds: Sequence[float]
    losses: Sequence[float]


def against_seconds(curves: Sequence[Curve], target: float) -> str:
    """The curves, time on a logarithmic scale, and the loss that they are timed to as a line."""

    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        axes = figure.subplots()
        bare(axes)
        axes.grid(axis="y", color=COLOURS["faint"], alpha=0.3, lw=0.6)
        if isfinite(target):
            axes.axhline(target, color=COLOURS["faint"], lw=1, ls=(0, (2, 2)), zorder=1)
        for curve in curves:
            name = COLOURS[f"series{curve.colour}"]
            axes.plot(
                curve.seconds, curve.losses, color=name, label=curve.label, zorder=2,
                lw=2.4 if curve.colour == 0 else 1.5, ls=(0, (4, 1.5)) if curve.dashed else "-",
            )  # fmt: skip
            axes.plot(curve.seconds[-1:], curve.losses[-1:], color=name, marker="o", ms=3.5)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("loss")
        figure.legend(loc="outside right upper", frameon=False, handlelength=1.6)

    return svg(draw, 340)
