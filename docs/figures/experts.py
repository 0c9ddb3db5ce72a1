"""Draws experts.svg of docs/parallelism.md: ``python docs/figures/experts.py``."""

from pathlib import Path

FILE = Path(__file__).with_suffix(".svg")
STYLE = """
  svg { --ink: #1f2328; --edge: #6b8cae; --paper: #ffffff; }
  @media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --edge: #6f93b8; --paper: #0d1117; } }
  text { fill: var(--ink); } .head { font-weight: 600; }
  .paper { fill: var(--paper); } .box { fill: none; stroke: var(--edge); }
  .edge { stroke: var(--edge); fill: none; stroke-width: 1.4; }
"""
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
#: Expert of each row of two ranks' samples; None: dropped.
CHOICES = ((0, 2, 0, 3, None), (1, 2, 2, 0, 3))
HEADS = ("router", "dispatch", "experts", "combine")


def row(x: int, y: int, expert: int | None) -> str:
    """A row of features in the colour of its expert."""
    fill = "none" if expert is None else COLORS[expert]
    return f'<rect class="edge" x="{x}" y="{y}" width="56" height="14" style="fill:{fill}"/>'


def line(x: int, y: int, to_x: int, to_y: int) -> str:
    """A row's way."""
    middle = (x + to_x) // 2
    return f'<path class="edge" d="M{x} {y} C{middle} {y} {middle} {to_y} {to_x} {to_y}"/>'


def svg() -> str:
    """Two ranks with two experts each; rows go to their experts and come back."""
    parts = [
        f'<text class="head" x="{20 + 215 * i}" y="24">{h}</text>' for i, h in enumerate(HEADS)
    ]
    places = sorted(
        (expert, rank, position)
        for rank, choices in enumerate(CHOICES)
        for position, expert in enumerate(choices)
        if expert is not None
    )
    slots = {place: index for index, place in enumerate(places)}
    for rank, choices in enumerate(CHOICES):
        top = 56 + 130 * rank
        parts += [
            f'<text x="20" y="{top - 6}">rank {rank}: positions</text>',
            f'<text x="450" y="{top - 6}">experts {2 * rank}, {2 * rank + 1}</text>',
        ]
        for position, expert in enumerate(choices):
            y = top + 20 * position
            parts += [row(20, y, expert), row(665, y, expert)]
            if expert is None:
                parts.append(f'<text x="84" y="{y + 12}">dropped: no room left</text>')
                continue
            slot = slots[expert, rank, position]
            there = 56 + 130 * (expert // 2) + 20 * (slot - own(0) * (expert // 2))
            parts += [row(450, there, expert), line(76, y + 7, 450, there + 7)]
            parts.append(line(506, there + 7, 665, y + 7))
    inside = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" font-size="14" '
        f'font-family="sans-serif" role="img"><title>Rows go to their experts and back</title>'
        f'<style>{STYLE}</style><rect class="paper" width="760" height="300"/>{inside}</svg>\n'
    )


def own(rank: int) -> int:
    """Number of the rows that go to a rank's experts."""
    return sum(e is not None and e // 2 == rank for choices in CHOICES for e in choices)


if __name__ == "__main__":
    FILE.write_text(svg())
