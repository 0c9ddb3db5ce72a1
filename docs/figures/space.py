"""Draws space.svg of docs/parallelism.md: ``python -m docs.figures.space``."""

from docs.figures.drawing import COLORS, FOLDER, box, picture, text
from mpitrain.group import share
from mpitrain.nn.rows import under_windows

FILE = FOLDER / "space.svg"
HEIGHT, RANKS, LINE, TOP = 11, 3, 20, 64


def row(x: int, number: int) -> str:
    """A row of an image in the colour of the rank that has it; a row of zeros is empty."""
    ranks = [rank for rank in range(RANKS) if number in range(HEIGHT)[share(HEIGHT, rank, RANKS)]]
    return box(x, TOP + LINE * number, 150, 14, COLORS[ranks[0]] if ranks else None)


def svg() -> str:
    """The rows of an image, and those that each rank's 3x3 filters at steps of 2 read."""
    windows = under_windows((HEIGHT + 1) // 2, 3, 2, 1, RANKS)
    parts = [text(20, 24, f"the {HEIGHT} rows of an image", "head")]
    parts += [row(20, number) for number in range(HEIGHT)]
    bottom = TOP + LINE * (HEIGHT + 1)
    for rank, needed in enumerate(windows):
        x = 220 + 205 * rank
        own = share((HEIGHT + 1) // 2, rank, RANKS)
        makes = f"rank {rank} makes rows {own.start} and {own.stop - 1}"
        parts.append(text(x, 24, makes, "head"))
        parts += [row(x, number) for number in range(needed.start, needed.stop)]
        parts += [box(x, bottom + 20, 14, 14, COLORS[rank])]
        parts.append(text(x + 20, bottom + 32, f"rank {rank}'s rows"))
    parts += [box(20, bottom + 20, 14, 14, None), text(40, bottom + 32, "zeros")]
    return picture("Rows of an image on three ranks", 820, bottom + 48, parts)


if __name__ == "__main__":
    FILE.write_text(svg())
