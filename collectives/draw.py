"""Pictures of a schedule: a grid of ranks and rounds as text, and as a figure."""

from pathlib import Path
from typing import Any

from collectives.errors import ScheduleError
from collectives.replay import Begin, Message, replay
from collectives.schedule import Schedule, Send

LEGEND = "r2>1 send recvbuf[2] to rank 1 · r2<1 receive it · r2+<1 receive and reduce · r2=s2 copy"


def grid(schedule: Schedule, columns: int = 8) -> str:
    """Ranks by rounds, one cell a round, at most ``columns`` rounds side by side.

    ``s``, ``r`` and ``w`` stand for sendbuf, recvbuf and workspace.
    """
    cells = [
        [" ".join(map(str, steps)) for steps in schedule.rounds(r)] for r in range(schedule.size)
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
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table
        ]
        lines.append("")
    return "\n".join([*lines, LEGEND])
