"""Draws space.svg of docs/parallelism.md: ``python docs/figures/space.py``."""

from pathlib import Path

from docs.figures.experts import COLORS, STYLE
from mpitrain.group import share
from mpitrain.nn.rows import under_windows

FILE = Path(__file__).with_suffix(".svg")
HEIGHT, RANKS, LINE = 11, 3, 20


def line(x: int, y: int, row: int) -> str:
    """A row of an image in the colour of the rank that has it; a row of zeros is empty."""
    ranks = [rank for rank in range(RANKS) if row in range(HEIGHT)[share(HEIGHT, rank, RANKS)]]
    fill = COLORS[ranks[0]] if ranks else "none"
    return f'<rect class="edge" x="{x}" y="{y}" width="150" height="14" style="fill:{fill}"/>'


def svg() -> str:
    """The rows of an image, and those that each rank's 3x3 filters at steps of 2 read."""
    windows = under_windows((HEIGHT + 1) // 2, 3, 2, 1, RANKS)
    parts = [f'<text class="head" x="20" y="24">the {HEIGHT} rows of an image</text>']
    parts += [line(20, 40 + LINE * row, row) for row in range(HEIGHT)]
    for rank, needed in enumerate(windows):
        x = 220 + 190 * rank
        own = share((HEIGHT + 1) // 2, rank, RANKS)
        parts.append(f'<text class="head" x="{x}" y="24">rank {rank} makes rows {own.start}')
        parts[-1] += f" and {own.stop - 1}</text>"
        parts += [line(x, 40 + LINE * row, row) for row in range(needed.start, needed.stop)]
    inside = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 270" font-size="14" '
        f'font-family="sans-serif" role="img"><title>Rows of an image on three ranks</title>'
        f'<style>{STYLE}</style><rect class="paper" width="780" height="270"/>{inside}</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(svg())
