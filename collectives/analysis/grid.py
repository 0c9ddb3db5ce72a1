"""A schedule as text: a grid of ranks and rounds."""

from collectives.errors import CollectiveError
from collectives.schedule import Schedule

LEGEND = (
    "s sendbuf, r recvbuf, w workspace; r2>1 send r2 to rank 1, r2<1 receive it, "
    "r2+<1 receive and reduce, r2=s2+<1 into r2 with s2, r2=s2 copy"
)
#: More are no picture any more, and as text take minutes.
MOST_RANKS = 128


def grid(schedule: Schedule, columns: int = 8) -> str:
    """Ranks by rounds, one cell a round, at most ``columns`` rounds side by side.

    Raises:
        CollectiveError: for more than 128 ranks.
    """
    if schedule.size > MOST_RANKS:
        raise CollectiveError(
            f"a grid shows at most {MOST_RANKS} ranks, not {schedule.size}; an algorithm looks "
            "alike on fewer: draw it with -n 16"
        )
    cells = [
        [" ".join(map(str, steps)) for steps in schedule.rounds(rank)]
        for rank in range(schedule.size)
    ]
    rounds = max(map(len, cells))
    for row in cells:
        row.extend([""] * (rounds - len(row)))
    lines = []
    for first in range(0, rounds, columns):
        table = [["", *(f"round {i}" for i in range(first, min(first + columns, rounds)))]]
        table += [[f"rank {r}", *row[first : first + columns]] for r, row in enumerate(cells)]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in table
        ]
        lines.append("")
    return "\n".join([*lines, LEGEND])
