"""A step of a layout whose stages are cut: its time, memory and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpitrain.pipeline.replay import Report
from mpitrain.pipeline.simulate import PassTimes, in_time
from mpitrain.search.stages import StageCosts
from mpitrain.search.sums import Span


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
    costs: Sequence[StageCosts], cut: Sequence[Sequence[Span]], report: Report, batch: int
) -> PredictedStep:
    """The step of a layout, by simulation.

    Args:
        costs: costs of the stages of each stage's width.
        cut: layers of the chunks of each stage.
        report: the replayed schedule.
        batch: samples of a step.
    """
    sums, machine, chunks = costs[0].sums, costs[0].machine, report.pipeline.chunks
    stages = [(own, sums.of(spans)) for own, spans in zip(costs, cut, strict=True)]
    silent = [replace(own, machine=own.machine.silent()) for own in costs]
    computing = in_time(report, passes(silent, cut, report))
    seconds = in_time(report, passes(costs, cut, report)).seconds
    whole = sums.whole
    useful = (whole.forward + whole.backward) * batch / machine.rate / machine.ranks
    sent = [own.sent(of) for own, of in stages]
    return PredictedStep(
        seconds,
        computing.seconds,
        useful / seconds if seconds else 0.0,
        computing.bubble,
        tuple(
            float(own.memory(of, report.held[stage, 0], chunks))
            for stage, (own, of) in enumerate(stages)
        ),
        max(sent, key=lambda purposes: sum(purposes.values())),
    )


def passes(
    costs: Sequence[StageCosts], cut: Sequence[Sequence[Span]], report: Report
) -> list[PassTimes]:
    """Times of each virtual stage."""
    times: dict[int, PassTimes] = {}
    for stage, (own, spans) in enumerate(zip(costs, cut, strict=True)):
        times |= dict(zip(report.pipeline.dealt[stage], own.passes(spans), strict=True))
    return [times[at] for at in sorted(times)]
