"""Schedules as pictures: one row a rank, time to the right."""

from collections.abc import Sequence
from pathlib import Path

from mpitrain.pipeline.actions import Pipeline, Update
from mpitrain.pipeline.simulate import Block, Simulation

#: Forward, backward, gradient by the input, gradient by the weights, update.
COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f2a75c", "W": "#54a24b", "U": "#79706e"}


def text(simulation: Simulation, pipeline: Pipeline, unit: float) -> str:
    """One line a rank; a forward pass of micro-batch 3 is ``F3``, a column is ``unit`` seconds."""
    width = 1 + len(str(pipeline.micro_batches - 1))
    columns = round(simulation.seconds / unit)
    lines = []
    for place in pipeline.places():
        cells = ["." * width] * columns
        for block in simulation.blocks:
            if block.place == place and not isinstance(block.action, Update):
                name = f"{block.action.letter}{block.action.micro_batch}"
                for column in range(round(block.start / unit), round(block.stop / unit)):
                    cells[column] = name.ljust(width)
        name = f"stage {place[0]}" + (f".{place[1]}" if max(pipeline.replicas) > 1 else "")
        lines.append(f"{name:>10} {' '.join(cells)}")
    return "\n".join(lines)


def picture(rows: Sequence[tuple[str, Sequence[Block]]], path: Path, title: str) -> None:
    """A Gantt chart of named rows of blocks, to a PNG or SVG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"a picture needs matplotlib ({error}): pip install 'mpitrain[plot]'"
        ) from error

    end = max((block.stop for _, blocks in rows for block in blocks), default=1.0)
    figure = Figure(figsize=(11, 0.9 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, (_, blocks) in enumerate(rows):
        for block in blocks:
            width = block.stop - block.start
            axes.barh(
                row,
                width,
                left=block.start,
                height=0.86,
                color=COLOURS[block.action.letter],
                edgecolor="white",
                linewidth=0.4,
                alpha=1.0 - 0.45 * (getattr(block.action, "chunk", 0) % 2),
            )
            if not isinstance(block.action, Update) and width > 0.012 * end:
                number = str(block.action.micro_batch)
                centre = block.start + width / 2
                axes.text(centre, row, number, ha="center", va="center", size=6.5, color="white")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("time")
    axes.set_title(title, loc="left", size=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=150)
