"""Pictures of a schedule: a grid of ranks and rounds as text, and as a figure."""

from pathlib import Path
from typing import Any

from collectives.analysis.cost import count
from collectives.analysis.pictures import pyplot
from collectives.analysis.replay import Begin, Message, replay
from collectives.analysis.structure import draw_structure
from collectives.errors import CollectiveError
from collectives.schedule import Copy, RecvReduce, Round, Schedule

LEGEND = (
    "s sendbuf, r recvbuf, w workspace; r2>1 send r2 to rank 1, r2<1 receive it, "
    "r2+<1 receive and reduce, r2=s2+<1 into r2 with s2, r2=s2 copy"
)
MOST_RANKS = 32


def grid(schedule: Schedule, columns: int = 8) -> str:
    """Ranks by rounds, one cell a round, at most ``columns`` rounds side by side."""
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


def figure(schedule: Schedule, path: Path) -> None:
    """Messages as arrows from the sender to the receiver, rounds from left to right; beside it,
    the tree, or who talks to whom.

    Colours are chunks; an open circle is a receive, a filled one a receive and reduce, a square a
    copy within the rank.

    Raises:
        CollectiveError: for more than 32 ranks, which would be a picture of nothing, and without
            matplotlib.
    """
    if schedule.size > MOST_RANKS:
        raise CollectiveError(f"a picture shows at most {MOST_RANKS} ranks, not {schedule.size}")
    plt = pyplot()
    programmes = [list(schedule.rounds(rank)) for rank in range(schedule.size)]
    rounds = max(map(len, programmes))
    width, height = max(7.0, 1.6 + 1.15 * rounds), max(3.2, 1.4 + 0.5 * schedule.size)
    canvas, (axes, beside) = plt.subplots(
        1, 2, figsize=(width + 4, height), width_ratios=(width, 4), layout="constrained"
    )
    draw_structure(beside, schedule)
    for edge in range(rounds + 1):
        axes.axvline(edge, color="0.9", zorder=0)
    for rank in range(schedule.size):
        axes.axhline(rank, color="0.85", zorder=0)

    colour = plt.get_cmap("turbo" if schedule.chunks > 10 else "tab10")
    shades = schedule.chunks if schedule.chunks > 10 else 10

    def shade(chunk: int) -> Any:
        blocks = chunk % max(schedule.chunks, schedule.size)
        return colour(blocks % shades / (shades - 1) if shades > 10 else blocks % shades)

    current: list[tuple[int, Round]] = [(0, ())] * schedule.size
    for event in replay(schedule):
        match event:
            case Begin(rank, number, steps):
                current[rank] = (number, steps)
                for step in steps:
                    if isinstance(step, Copy):
                        axes.plot(number + 0.5, rank, "s", color=shade(step.chunk.start), ms=5)
            case Message(sender, _, receiver, received):
                number, steps = current[receiver]
                target = steps[received]
                tint = shade(target.chunk.start)
                start, end = (current[sender][0] + 0.1, sender), (number + 0.86, receiver)
                axes.annotate(
                    "",
                    end,
                    start,
                    arrowprops={"arrowstyle": "-|>", "color": tint, "lw": 1.3, "shrinkB": 5},
                )
                face = tint if isinstance(target, RecvReduce) else "white"
                axes.plot(*end, "o", color=tint, markerfacecolor=face, ms=7, zorder=3)
                if len(steps) <= 4:
                    axes.annotate(
                        str(target.chunk),
                        end,
                        (6, 5),
                        textcoords="offset points",
                        fontsize=7,
                        color="0.25",
                    )
    cost = count(schedule)
    axes.set_title(
        f"{schedule}: {cost.latency} messages in a row, {cost.sent:.2f} buffers sent by the "
        "busiest rank",
        fontsize=10,
    )
    axes.set_xlabel("round")
    axes.set_ylabel("rank")
    axes.set_xticks([i + 0.5 for i in range(rounds)], [str(i) for i in range(rounds)])
    axes.set_yticks(range(schedule.size))
    axes.set_xlim(0, rounds)
    axes.set_ylim(schedule.size - 0.4, -0.6)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    marks = [("o", "white", "receive"), ("o", "0.3", "receive and reduce")]
    if any(isinstance(s, Copy) for rows in programmes for steps in rows for s in steps):
        marks.append(("s", "0.3", "copy"))
    for marker, face, label in marks:
        axes.plot([], [], marker, color="0.3", markerfacecolor=face, label=label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=8, frameon=False)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def curves(table: dict[str, list[tuple[int, float]]], title: str, path: Path) -> None:
    """Simulated seconds against ranks, one curve for each algorithm."""
    plt = pyplot()
    canvas, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, points in table.items():
        if points:
            ranks, seconds = zip(*points)
            axes.plot(ranks, [1e3 * s for s in seconds], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("simulated time (ms)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)
