"""A step of a layout whose stages are cut: its time, memory and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mpitrain.pipeline.replay import Report
from mpitrain.pipeline.simulate import PassTimes, Simulation, in_time
from mpitrain.search.stages import StageCosts
from mpitrain.search.sums import LayerSums, Span


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


@dataclass(frozen=True)
class SimulatedStep:
    """A step of a layout.

    Attributes:
        costs: costs of the stages of each stage's width.
        cut: layers of the chunks of each stage.
        report: the replayed schedule.
        batch: samples of a step.
    """

    costs: Sequence[StageCosts]
    cut: Sequence[Sequence[Span]]
    report: Report
    batch: int

    @cached_property
    def stages(self) -> list[tuple[StageCosts, LayerSums]]:
        """The costs of each stage, and the sums over its layers."""
        return [(own, own.sums.of(spans)) for own, spans in zip(self.costs, self.cut, strict=True)]

    @cached_property
    def memory(self) -> tuple[float, ...]:
        """Bytes of a rank of each stage."""
        chunks, held = self.report.pipeline.chunks, self.report.held
        return tuple(
            float(own.memory(of, held[stage, 0], chunks))
            for stage, (own, of) in enumerate(self.stages)
        )

    @cached_property
    def seconds(self) -> float:
        """Time of the step."""
        return self.simulated(self.costs).seconds

    def simulated(self, costs: Sequence[StageCosts]) -> Simulation:
        """The schedule in time, by other costs."""
        times: dict[int, PassTimes] = {}
        dealt = self.report.pipeline.dealt
        for virtual, own, spans in zip(dealt, costs, self.cut, strict=True):
            times |= dict(zip(virtual, own.passes(spans), strict=True))
        return in_time(self.report, [times[at] for at in sorted(times)])

    def predicted(self) -> PredictedStep:
        """All that is known of it."""
        machine, whole = self.costs[0].machine, self.costs[0].sums.whole
        silent = [replace(own, machine=own.machine.silent()) for own in self.costs]
        computing, sent = self.simulated(silent), [own.sent(of) for own, of in self.stages]
        useful = (whole.forward + whole.backward) * self.batch / machine.rate / machine.ranks
        return PredictedStep(
            self.seconds,
            computing.seconds,
            useful / self.seconds if self.seconds else 0.0,
            max(0.0, computing.bubble),
            self.memory,
            max(sent, key=lambda purposes: sum(purposes.values())),
        )
