"""A step of a layout whose stages are cut: its time, memory and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.schedules import Generator
from mpitrain.pipeline.simulate import PassTimes, Simulation, simulate
from mpitrain.search.stages import Span, StageCosts


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step.

    Attributes:
        seconds: its time.
        computing: its time if communication took none.
        busy: share of ``seconds`` in which a rank does the model's work, mean over the ranks.
        bubble: share of ``computing`` in which a rank is idle, mean over the ranks.
        memory: bytes of a rank of each stage.
        sent: bytes that a rank sends, by purpose, of the stage whose ranks send most.
    """

    seconds: float
    computing: float
    busy: float
    bubble: float
    memory: tuple[float, ...]
    sent: dict[str, float]


def predict(
    costs: Sequence[StageCosts],
    cut: Sequence[Sequence[Span]],
    pipeline: Pipeline,
    generate: Generator,
    held: Sequence[int],
    batch: int,
) -> PredictedStep:
    """The step of a layout, by simulation.

    Args:
        costs: costs of the stages of each stage's width.
        cut: layers of the chunks of each stage.
        pipeline: the pipeline.
        generate: its schedule.
        held: most activations of chunks that each stage holds.
        batch: samples of a step.

    Raises:
        PipelineError: the schedule cannot run.
    """
    first = costs[0]
    stages = list(zip(costs, cut, held, strict=True))
    silent = [replace(own, machine=own.machine.silent()) for own in costs]
    computing = _simulated(silent, cut, pipeline, generate)
    seconds = _simulated(costs, cut, pipeline, generate).seconds
    work = sum(layer.forward + layer.backward for layer in first.layers)
    useful = work * batch / first.machine.rate / first.machine.ranks
    return PredictedStep(
        seconds,
        computing.seconds,
        useful / seconds if seconds else 0.0,
        computing.bubble,
        tuple(own.state(spans) + own.kept(spans, most) for own, spans, most in stages),
        max((own.sent(spans) for own, spans, _ in stages), key=lambda sent: sum(sent.values())),
    )


def _simulated(
    costs: Sequence[StageCosts],
    cut: Sequence[Sequence[Span]],
    pipeline: Pipeline,
    generate: Generator,
) -> Simulation:
    times: dict[int, PassTimes] = {}
    for stage, (own, spans) in enumerate(zip(costs, cut, strict=True)):
        times |= dict(zip(pipeline.dealt[stage], own.stage_times(spans), strict=True))
    return simulate(generate, pipeline, [times[at] for at in sorted(times)])
