"""Draws experts.svg of docs/parallelism.md: ``python -m docs.figures.experts``."""

from docs.figures.drawing import COLORS, FOLDER, box, line, picture, text

FILE = FOLDER / "experts.svg"
#: Expert of each row of two ranks' samples; None: dropped.
CHOICES = ((0, 2, 0, 3, None), (1, 2, 2, 0, 3))
HEADS = ("router", "dispatch", "experts", "combine")


def row(x: int, y: int, expert: int | None) -> str:
    """A row of features in the colour of its expert."""
    return box(x, y, 56, 14, None if expert is None else COLORS[expert])


def svg() -> str:
    """Two ranks with two experts each; rows go to their experts and come back."""
    parts = [text(20 + 215 * i, 24, head, "head") for i, head in enumerate(HEADS)]
    places = sorted(
        (expert, rank, position)
        for rank, choices in enumerate(CHOICES)
        for position, expert in enumerate(choices)
        if expert is not None
    )
    slots = {place: index for index, place in enumerate(places)}
    for rank, choices in enumerate(CHOICES):
        top = 56 + 130 * rank
        parts.append(text(20, top - 6, f"rank {rank}: positions"))
        parts.append(text(450, top - 6, f"experts {2 * rank}, {2 * rank + 1}"))
        for position, expert in enumerate(choices):
            y = top + 20 * position
            parts += [row(20, y, expert), row(665, y, expert)]
            if expert is None:
                parts.append(text(729, y + 12, "dropped: no room"))
                continue
            slot = slots[expert, rank, position]
            there = 56 + 130 * (expert // 2) + 20 * (slot - own(0) * (expert // 2))
            parts += [row(450, there, expert), line(76, y + 7, 450, there + 7)]
            parts.append(line(506, there + 7, 665, y + 7))
    return picture("Rows go to their experts and back", 850, 300, parts)


def own(rank: int) -> int:
    """Number of the rows that go to a rank's experts."""
    return sum(e is not None and e // 2 == rank for choices in CHOICES for e in choices)


if __name__ == "__main__":
    FILE.write_text(svg())
