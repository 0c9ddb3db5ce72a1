"""Schedules as pictures: one row a rank, time to the right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.errors import needed
from mpitrain.pipeline.actions import Pipeline, Update
from mpitrain.pipeline.replay import StageReplica
from mpitrain.pipeline.simulate import Simulation, TimedAction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Forward, backward, gradient by the input, gradient by the weights, update; the colour-blind can
#: tell these colours apart.
COLOURS = {"F": "#0072b2", "B": "#e69f00", "I": "#f3cf73", "W": "#009e73", "U": "#6f6a62"}
#: Colours of text on them.
INK = {"F": "white", "B": "#241800", "I": "#241800", "W": "white", "U": "white"}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, by the input",
    "W": "backward, by the weights",
}


def by_place(
    simulation: Simulation, pipeline: Pipeline
) -> Mapping[StageReplica, list[TimedAction]]:
    """The actions of each place, in the order of the places."""
    found: dict[StageReplica, list[TimedAction]] = {place: [] for place in pipeline.places()}
    for block in simulation.blocks:
        found[block.place].append(block)
    return found


def place_name(place: StageReplica, pipeline: Pipeline) -> str:
    """``0``, or ``0.1`` where stages have replicas."""
    return ".".join(map(str, place if max(pipeline.replicas) > 1 else place[:1]))


def text(simulation: Simulation, pipeline: Pipeline, unit: float) -> str:
    """One line a rank; a forward pass of micro-batch 3 is ``F3``, ``F3.1`` that of chunk 1; a
    column is ``unit`` seconds."""
    is_cut = pipeline.chunks > 1
    width = 1 + len(str(pipeline.micro_batches - 1)) + is_cut * (1 + len(str(pipeline.chunks - 1)))
    columns = round(simulation.seconds / unit)
    lines = []
    for place, blocks in by_place(simulation, pipeline).items():
        cells = ["." * width] * columns
        for block in blocks:
            if not isinstance(block.action, Update):
                action = block.action
                name = f"{action.letter}{action.micro_batch}" + f".{action.chunk}" * is_cut
                for column in range(round(block.start / unit), round(block.stop / unit)):
                    cells[column] = name.ljust(width)
        lines.append(f"{'stage ' + place_name(place, pipeline):>10} {' '.join(cells)}")
    return "\n".join(lines)


def picture(rows: Sequence[tuple[str, Sequence[TimedAction]]], path: Path, title: str) -> None:
    """A Gantt chart of named rows of blocks, to a PNG or SVG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    drawn = figure(figsize=(11, 1.2 + 0.42 * len(rows)))
    from matplotlib.patches import Patch

    end = max((block.stop for _, blocks in rows for block in blocks), default=1.0)
    axes = drawn.subplots()
    for row, (_, blocks) in enumerate(rows):
        for block in blocks:
            width, kind = block.stop - block.start, block.action.letter
            paler = getattr(block.action, "chunk", 0) % 2
            look: dict[str, Any] = {
                "color": COLOURS[kind],
                "alpha": 1.0 - 0.45 * paler,
                "edgecolor": "white",
            }
            axes.barh(row, width, left=block.start, height=0.86, linewidth=0.4, **look)
            if not isinstance(block.action, Update) and width > 0.012 * end:
                number = str(block.action.micro_batch)
                centre = block.start + width / 2
                ink = "black" if paler else INK[kind]
                axes.text(centre, row, number, ha="center", va="center", size=8, color=ink)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("time; white: idle")
    actions = [block.action for _, blocks in rows for block in blocks]
    kinds = {action.letter for action in actions}
    keys = [Patch(color=COLOURS[k], label=name) for k, name in NAMES.items() if k in kinds]
    if any(getattr(action, "chunk", 0) % 2 for action in actions):
        keys.append(Patch(color=COLOURS["F"], alpha=0.55, label="paler: the second chunk"))
    keys.append(Patch(color="none", label="the number is the micro-batch"))
    drawn.legend(handles=keys, loc="outside lower left", ncols=6, fontsize=8, frameon=False)
    axes.set_title(title, loc="left", size=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    drawn.savefig(path, dpi=150)


def figure(**options: Any) -> "Figure":
    """An empty matplotlib figure; ``options`` are those of ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    module = needed("matplotlib", "plot", "a picture", module="matplotlib.figure")
    drawn: Figure = module.Figure(layout="constrained", **options)
    return drawn
