"""Who talks to whom in a schedule: the tree, the ring or the butterfly behind the rounds."""

from collections import defaultdict
from math import cos, pi, sin
from typing import Any

from collectives.analysis.pictures import pyplot
from collectives.schedule import Recv, Schedule, Send

Place = tuple[float, float]
#: More trees than this are a thicket; the circle shows them better.
_MOST_TREES = 3


def trees(schedule: Schedule) -> dict[int, dict[int, int]]:
    """For each first chunk of a message, the parent of each rank, if all of them form trees.

    A parent is who sends a rank its result or, where there is no result to send, who takes in what
    the rank sends.  Empty if some chunk goes along no tree.
    """
    down: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    up: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank in range(schedule.size):
        for steps in schedule.rounds(rank):
            for step in steps:
                if isinstance(step, Recv):
                    down[step.chunk.start][rank].add(step.peer)
                elif isinstance(step, Send):
                    up[step.chunk.start][rank].add(step.peer)
    found = {}
    for chunk, parents in (down or up).items():
        if len(parents) != schedule.size - 1 or any(len(p) != 1 for p in parents.values()):
            return {}
        found[chunk] = {rank: next(iter(peers)) for rank, peers in parents.items()}
        if any(_depth(found[chunk], rank) > schedule.size for rank in found[chunk]):
            return {}
    return found if 1 <= len(found) <= _MOST_TREES else {}


def _depth(parents: dict[int, int], rank: int) -> int:
    depth = 0
    while rank in parents and depth <= len(parents) + 1:
        rank, depth = parents[rank], depth + 1
    return depth


def draw_structure(axes: Any, schedule: Schedule) -> None:
    """The trees, side by side, or all ranks on a circle with a line for each pair that talks.

    Lines on the circle are coloured by the round in which the two talk first.
    """
    axes.set_axis_off()
    axes.set_aspect("equal" if not trees(schedule) else "auto")
    found = trees(schedule)
    if found:
        for number, (chunk, parents) in enumerate(sorted(found.items())):
            _draw_tree(axes, parents, schedule.size, number * (schedule.size + 1), f"C{chunk % 10}")
        axes.set_title("the tree" if len(found) == 1 else "the trees", fontsize=9)
        return
    size = schedule.size
    circle = [(sin(2 * pi * r / size), cos(2 * pi * r / size)) for r in range(size)]
    first: dict[frozenset[int], int] = {}
    for rank in range(size):
        for number, steps in enumerate(schedule.rounds(rank)):
            for step in steps:
                if isinstance(step, Send):
                    pair = frozenset((rank, step.peer))
                    first[pair] = min(number, first.get(pair, number))
    shades = pyplot().get_cmap("viridis")
    last = max(first.values(), default=0) or 1
    for pair, number in first.items():
        (x0, y0), (x1, y1) = (circle[r] for r in sorted(pair))
        axes.plot([x0, x1], [y0, y1], color=shades(0.9 * number / last), lw=1.6, zorder=1)
    _draw_ranks(axes, dict(enumerate(circle)), "0.25")
    axes.set_title("who talks to whom (dark: first)", fontsize=9)
    axes.margins(0.15)


def _draw_tree(axes: Any, parents: dict[int, int], size: int, left: float, colour: str) -> None:
    children: dict[int, list[int]] = defaultdict(list)
    for rank, parent in sorted(parents.items()):
        children[parent].append(rank)
    places: dict[int, Place] = {}
    free = left

    def lay(rank: int, depth: int) -> float:
        """Leaves take the next free column, the others stand over the middle of theirs."""
        nonlocal free
        below = [lay(child, depth + 1) for child in children[rank]]
        x = sum(below) / len(below) if below else free
        if not below:
            free += 1
        places[rank] = (x, -float(depth))
        return x

    root = next(rank for rank in range(size) if rank not in parents)
    lay(root, 0)
    for rank, parent in parents.items():
        (x0, y0), (x1, y1) = places[parent], places[rank]
        axes.plot([x0, x1], [y0, y1], color=colour, lw=1.6, zorder=1)
    _draw_ranks(axes, places, colour)


def _draw_ranks(axes: Any, places: dict[int, Place], colour: str) -> None:
    for rank, (x, y) in places.items():
        axes.plot(x, y, "o", color=colour, markerfacecolor="white", ms=15, zorder=2)
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=8, zorder=3)
