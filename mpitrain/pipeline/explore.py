"""Pipeline schedules as a page that steps through time."""

from collections.abc import Sequence
from typing import Any

from collectives.analysis import fill
from mpitrain.pipeline.actions import Pipeline, Update
from mpitrain.pipeline.replay import replay
from mpitrain.pipeline.schedules import PipelineSchedule
from mpitrain.pipeline.simulate import PassTimes, balanced, simulate


def record(schedule: PipelineSchedule, pipeline: Pipeline, times: PassTimes) -> dict[str, Any]:
    """A schedule in time, as data for JSON.

    Returns:
        ``name``, ``description``, ``seconds``, the ``bubble`` as a part of them; names of
        ``stages``; ``held``, the most activations that each stage holds; and ``blocks``, the
        actions as ``[index of the stage, letter, micro-batch, chunk, start, stop]``, with
        micro-batch -1 for updates.

    Raises:
        ValueError: the schedule cannot run on such a pipeline.
    """
    report = replay(schedule.generate, pipeline)
    found = simulate(schedule.generate, pipeline, balanced(pipeline, times))
    places = list(pipeline.places())
    several = max(pipeline.replicas) > 1
    blocks: list[list[object]] = []
    for block in found.blocks:
        action, place = block.action, places.index(block.place)
        item = (-1, 0) if isinstance(action, Update) else (action.micro_batch, action.chunk)
        span = round(block.start, 9), round(block.stop, 9)
        blocks.append([place, action.letter, *item, *span])
    return {
        "name": schedule.name,
        "description": schedule.description,
        "seconds": round(found.seconds, 9),
        "bubble": found.bubble,
        "stages": [f"stage {s}.{r}" if several else f"stage {s}" for s, r in places],
        "held": [report.held[place] for place in places],
        "blocks": blocks,
    }


def explorer(pipelines: Sequence[tuple[PipelineSchedule, Pipeline]], times: PassTimes) -> str:
    """One HTML file that steps through schedules, which share their number of stages."""
    runs: Sequence[dict[str, Any]] = [
        record(schedule, pipeline, times) for schedule, pipeline in pipelines
    ]
    shape = pipelines[0][1]
    title = f"Pipeline schedules: {shape.stages} stages, {shape.micro_batches} micro-batches"
    data = {"title": title, "schedules": runs}
    return fill("mpitrain.pipeline", "schedules.html", title, data)
