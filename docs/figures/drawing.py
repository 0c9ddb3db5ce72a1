"""Colours, boxes, lines and the file that all pictures of docs/parallelism.md share."""

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
STYLE = """
  svg { --ink: #1f2328; --edge: #6b8cae; --paper: #ffffff; }
  @media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --edge: #6f93b8; --paper: #0d1117; } }
  text { fill: var(--ink); } .head { font-weight: 600; }
  .paper { fill: var(--paper); } .box { fill: none; stroke: var(--edge); }
  .edge { stroke: var(--edge); fill: none; stroke-width: 1.4; }
"""
#: A colour for each rank or expert.
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
#: Colour of parts that all ranks have alike.
COMMON = "#9aa3ad"


def box(x: float, y: float, width: float, height: float, fill: str | None) -> str:
    """A box in a colour; None: an empty one."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="edge" {place} style="fill:{fill or "none"}"/>'


def line(x: float, y: float, to_x: float, to_y: float) -> str:
    """A way from the left to the right."""
    middle = (x + to_x) / 2
    way = f"M{x:g} {y:g} C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"
    return f'<path class="edge" d="{way}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words that begin at ``x``, or have their middle or end there."""
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{kind} x="{x:g}" y="{y:g}"{anchor}>{words}</text>'


def picture(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """The whole SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="14" '
        f'font-family="sans-serif" role="img"><title>{title}</title><style>{STYLE}</style>'
        f'<rect class="paper" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )
