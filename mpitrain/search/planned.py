"""The step of a job in the layout that its own tables say."""

from dataclasses import dataclass

from mpitrain.config import Config
from mpitrain.parallel.grid import Layout
from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.replay import Report
from mpitrain.search.candidates import Candidate
from mpitrain.search.job import Job
from mpitrain.search.layouts import Search
from mpitrain.search.prices import chunks_of
from mpitrain.search.stages import StageCosts
from mpitrain.search.step import PredictedStep, SimulatedStep
from mpitrain.search.sums import Span
from mpitrain.training.partition import Partition, layout_of, partition_of, schedule_of


@dataclass(frozen=True)
class Planned:
    """A job in its layout.

    Attributes:
        config: the job.
        layout: its grid of ranks.
        cut: layers of each stage.
        pipeline: pipeline of a step.
        report: the proof of its schedule.
        costs: costs of the stages of each stage's width.
        spans: layers of the chunks of each stage.
        step: the predicted step.
    """

    config: Config
    layout: Layout
    cut: Partition
    pipeline: Pipeline
    report: Report
    costs: tuple[StageCosts, ...]
    spans: tuple[list[Span], ...]
    step: PredictedStep

    def __str__(self) -> str:
        own = self.config.parallel
        extras: list[str] = [own.schedule] * (self.layout.stages > 1)
        extras += [key for key in ("sequence", "recompute") if getattr(own, key)]
        extras += [f"ZeRO-{own.zero}"] * (own.zero > 0)
        parts = self.config.train.micro_batches
        return ", ".join([str(self.layout), *extras, f"{parts} micro-batches"])

    def names(self, stage: int) -> list[str]:
        """The layers of a stage."""
        return [name for chunk in self.cut.of_stage(stage) for name in chunk]


def planned(job: Job, search: Search, config: Config) -> Planned:
    """The step of a job on the ranks of a search's machine.

    Args:
        job: the job in any layout.
        search: costs of its layers, and the machine.
        config: the job in the layout to plan.

    Raises:
        ConfigError: the layout cannot be.
    """
    layout = layout_of(config, search.machine.ranks)
    cut = partition_of(config, job.model, layout)
    pipeline, report = schedule_of(config, cut.schedule, layout)
    spans = tuple(chunks_of([*map(len, cut.layers)], pipeline))
    own = config.parallel
    costs = tuple(
        search.costs(
            Candidate(
                layout.stages,
                replicas,
                layout.tensor,
                own.sequence,
                own.zero,
                own.recompute,
                pipeline.micro_batches // replicas,
                layout.context,
                layout.experts,
                own.attention,
                layout.rows,
            )
        )
        for replicas in layout.replicas
    )
    step = SimulatedStep(costs, spans, report, config.train.batch_size).predicted()
    return Planned(config, layout, cut, pipeline, report, costs, spans, step)
