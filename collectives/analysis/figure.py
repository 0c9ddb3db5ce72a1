"""A schedule as a figure: messages as arrows between ranks, rounds from left to right."""

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from collectives.analysis.pictures import expect_picture, pyplot
from collectives.analysis.structure import draw_structure
from collectives.compile.cost import count
from collectives.compile.replay import Begin, Message, replay
from collectives.errors import CollectiveError
from collectives.schedule import Chunk, Copy, RecvReduce, Round, Schedule

MOST_RANKS = 32
#: Columns side by side; the others follow below.
COLUMNS = 8
#: With more ranks, or more messages in a round, rank 0's messages stand for all.
CLEAR_RANKS, CLEAR_MESSAGES = 12, 100
#: Colours that colour-blind readers can tell apart (Okabe and Ito's, darker where pale).
_HUES = ("#0072b2", "#d55e00", "#009e73", "#b3568f", "#b8860b", "#3a9ad9", "#7a3b10", "#4d4d4d")


class Arrow(NamedTuple):
    """One message; ``target`` is where it arrives, ``sent`` the sender's round."""

    sender: int
    receiver: int
    target: Chunk
    reduces: bool
    sent: int


class Moves(NamedTuple):
    """Messages of one round of all ranks, and copies within a rank."""

    arrows: list[Arrow]
    copies: list[tuple[int, Chunk]]

    @property
    def shape(self) -> object:
        """A value that is equal for rounds that differ only in the chunks that they move."""
        lengths = [(a.sender, a.receiver, a.reduces, a.target.length) for a in self.arrows]
        copied = [(rank, chunk.length) for rank, chunk in self.copies]
        return sorted(lengths), sorted(copied)


def figure(schedule: Schedule, path: Path) -> None:
    """Draws ``schedule`` into a PNG, SVG or PDF file, by the suffix of ``path``.

    Beside the rounds are the tree, or who talks to whom.  An open circle is a receive, a filled one
    a receive and reduce, a square a copy within the rank; equal rounds in a row are drawn once.

    Raises:
        CollectiveError: more than 32 ranks, another suffix, or no matplotlib.
    """
    if schedule.size > MOST_RANKS:
        raise CollectiveError(f"a picture shows at most {MOST_RANKS} ranks, not {schedule.size}")
    expect_picture(path)
    plt = pyplot()
    rounds = moves(schedule)
    shown = columns(rounds)
    lines = max(1, -(-len(shown) // COLUMNS))
    across = max(1, -(-len(shown) // lines))
    rows = [shown[i * across : (i + 1) * across] for i in range(lines)]
    width = max(7.0, 1.6 + 1.15 * across)
    height = max(3.2, 1.2 + 0.42 * schedule.size)
    canvas, panels = plt.subplots(
        lines,
        2,
        figsize=(width + 4, height * lines + 0.5),
        width_ratios=(width, 4),
        squeeze=False,
        layout="constrained",
    )
    draw_structure(panels[0][1], schedule)
    for row, (axes, beside) in zip(rows, panels):
        _draw_row(axes, schedule, rounds, row)
        axes.set_xlim(0, across)
        if beside is not panels[0][1]:
            beside.set_axis_off()
    cost = count(schedule)
    canvas.suptitle(
        f"{schedule}: {cost.latency} messages in a row, {cost.sent:.2f} buffers sent by the "
        f"busiest rank{_omission(schedule, rounds)}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    _legend(canvas, schedule, rounds)
    with plt.rc_context({"svg.hashsalt": "schedule", "svg.fonttype": "none"}):
        without_date = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
        canvas.savefig(path, dpi=110, **without_date)
    plt.close(canvas)


def moves(schedule: Schedule) -> list[Moves]:
    """The rounds, of all ranks together; a message counts to its receiver's round."""
    programs = [list(schedule.rounds(rank)) for rank in range(schedule.size)]
    rounds = [Moves([], []) for _ in range(max(map(len, programs)))]
    current: list[tuple[int, Round]] = [(0, ())] * schedule.size
    for event in replay(schedule):
        match event:
            case Begin(rank, number, steps):
                current[rank] = (number, steps)
                copies = [(rank, step.chunk) for step in steps if isinstance(step, Copy)]
                rounds[number].copies.extend(copies)
            case Message(sender, _, receiver, received):
                number, steps = current[receiver]
                step = steps[received]
                reduces = isinstance(step, RecvReduce)
                arrow = Arrow(sender, receiver, step.chunk, reduces, current[sender][0])
                rounds[number].arrows.append(arrow)
    return rounds


def columns(rounds: list[Moves]) -> list[int | str]:
    """Columns of the figure: numbers of rounds, and a note in the place of equal ones in a row."""
    numbered = list(enumerate(rounds))
    if len(rounds) <= COLUMNS:
        return [number for number, _ in numbered]
    shown: list[int | str] = []
    for _, alike in groupby(numbered, key=lambda item: item[1].shape):
        numbers = [number for number, _ in alike]
        if len(numbers) < 5:
            shown += numbers
        else:
            shown += [numbers[0], numbers[1], f"{len(numbers) - 3} more\nalike", numbers[-1]]
    return shown


def shade(schedule: Schedule, chunk: int) -> tuple[float, float, float]:
    """Colour of a chunk; with more than eight chunks, an eighth share a hue and fade in it."""
    total = max(schedule.chunks, schedule.size)
    chunk %= total
    family, place = chunk, 0.0
    if total > len(_HUES):
        family = chunk * len(_HUES) // total
        first = -(-family * total // len(_HUES))
        place = (chunk - first) / (total / len(_HUES))
    red, green, blue = (int(_HUES[family][i : i + 2], 16) / 255 for i in (1, 3, 5))
    pale = 0.55 * place
    return red + (1 - red) * pale, green + (1 - green) * pale, blue + (1 - blue) * pale


def _is_crowded(schedule: Schedule, rounds: list[Moves]) -> bool:
    return schedule.size > CLEAR_RANKS or any(len(r.arrows) > CLEAR_MESSAGES for r in rounds)


def _omission(schedule: Schedule, rounds: list[Moves]) -> str:
    """Line of the title about messages that are not drawn in full."""
    if not _is_crowded(schedule, rounds):
        return ""
    others = any(len(r.arrows) > CLEAR_MESSAGES for r in rounds)
    return (
        "\nonly the messages of rank 0 are drawn"
        if others
        else "\nthe messages of rank 0 in colour"
    )


def _draw_row(axes: Any, schedule: Schedule, rounds: list[Moves], row: list[int | str]) -> None:
    for edge in range(len(row) + 1):
        axes.axvline(edge, color="0.9", zorder=0)
    for rank in range(schedule.size):
        axes.axhline(rank, color="0.85", zorder=0)
    middle = (schedule.size - 1) / 2
    for left, column in enumerate(row):
        if isinstance(column, str):
            axes.axvspan(left, left + 1, color="0.96", zorder=0.5)
            axes.text(left + 0.5, middle, column, ha="center", va="center", fontsize=8, color="0.3")
        elif not any(rounds[column]):
            said = "empty, and\nfree: the ranks\nkeep in step"
            axes.text(left + 0.5, middle, said, ha="center", va="center", fontsize=8, color="0.3")
        else:
            _draw_round(axes, schedule, rounds[column], column, left, _is_crowded(schedule, rounds))
    names = [str(c) if isinstance(c, int) else "…" for c in row]
    axes.set_xticks([i + 0.5 for i in range(len(row))], names)
    axes.set_yticks(range(schedule.size))
    axes.set_xlabel("round")
    axes.set_ylabel("rank")
    axes.set_ylim(schedule.size - 0.4, -0.6)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_round(
    axes: Any, schedule: Schedule, round_: Moves, number: int, left: int, crowded: bool
) -> None:
    for rank, chunk in round_.copies:
        axes.plot(left + 0.5, rank, "s", color=shade(schedule, chunk.start), ms=5)
    arrows = round_.arrows
    if len(arrows) > CLEAR_MESSAGES:
        arrows = [arrow for arrow in arrows if 0 in (arrow.sender, arrow.receiver)]
    arriving = Counter(arrow.receiver for arrow in arrows)
    placed: Counter[int] = Counter()
    for arrow in arrows:
        faint = crowded and 0 not in (arrow.sender, arrow.receiver)
        tint: Any = "0.85" if faint else shade(schedule, arrow.target.start)
        # Several that arrive at one rank stand beneath one another, and so do their labels.
        several = arriving[arrow.receiver]
        step = min(0.28, 0.8 / several)
        height = arrow.receiver + (placed[arrow.receiver] - (several - 1) / 2) * step
        placed[arrow.receiver] += 1
        start, end = (left + 0.1 + arrow.sent - number, arrow.sender), (left + 0.78, height)
        thick = 1.3 if arrow.target.length == 1 else 2.2
        style = {"arrowstyle": "-|>", "color": tint, "lw": 0.7 if faint else thick, "shrinkB": 4}
        axes.annotate("", end, start, arrowprops=style, zorder=1 if faint else 2)
        if faint:
            continue
        face = tint if arrow.reduces else "white"
        small = 7 if several <= 2 else 5 if several <= 4 else 3
        axes.plot(*end, "o", color=tint, markerfacecolor=face, ms=small, zorder=3)
        if several <= 4:
            axes.annotate(
                str(arrow.target),
                end,
                (6, 0),
                textcoords="offset points",
                fontsize=7 if several <= 2 else 6,
                va="center",
                color="0.2",
            )


def _legend(canvas: Any, schedule: Schedule, rounds: list[Moves]) -> None:
    from matplotlib.lines import Line2D

    def mark(marker: str, face: str) -> Any:
        return Line2D([], [], color="0.3", marker=marker, markerfacecolor=face, ls="")

    marks = [(mark("o", "white"), "receive"), (mark("o", "0.3"), "receive and reduce")]
    if any(r.copies for r in rounds):
        marks.append((mark("s", "0.3"), "copy within the rank"))
    many = max(schedule.chunks, schedule.size) > len(_HUES)
    said = "an eighth of the chunks each, paler to its end" if many else "a chunk each"
    marks.append((Line2D([], [], color=_HUES[0], lw=2), f"colours: {said}"))
    if any(a.target.length > 1 for r in rounds for a in r.arrows):
        marks.append((Line2D([], [], color="0.3", lw=2.2), "thick: several chunks"))
    handles, labels = zip(*marks)
    canvas.legend(handles, labels, loc="outside lower left", ncols=5, fontsize=8, frameon=False)
