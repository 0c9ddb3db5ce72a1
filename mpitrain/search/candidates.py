"""A layout that the search tries."""

from dataclasses import dataclass, replace
from math import gcd, lcm

from mpitrain.config import Parallel
from mpitrain.metrics.words import counted
from mpitrain.nn.positions import Way
from mpitrain.parallel.grid import Layout, axes
from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.schedules import SCHEDULES, PipelineSchedule

#: Keys of [parallel] that a job may have, and that no layout of the search reads.
_UNREAD = ("links", "profile", "weights", "window")


@dataclass(frozen=True)
class Candidate:
    """A layout, all but the cut into stages.

    Attributes:
        pipe, data, tensor: stages, replicas of each, ranks that share each layer.
        sequence: whether the tensor ranks share the positions between the layers, too.
        zero: ZeRO level.
        recompute: whether activations are computed again.
        micro_batches: micro-batches of each replica in a step.
        context: ranks that share the positions of a sample.
        experts: ranks over which experts are spread; 0: all replicas share a recommender's tables.
        attention: how context ranks attend to all positions.
        rows: whether context ranks share the rows of images, not the positions of a sequence.
        schedule, chunks: order of work in the pipeline, and pieces of the model on each stage.
        replicas: replicas of each stage, where they differ; of the widest stage are
            ``micro_batches`` then.
        deals: whether the cut says how many of ``data`` ranks each stage has; ``pipe`` is 1.
    """

    pipe: int
    data: int
    tensor: int
    sequence: bool = False
    zero: int = 0
    recompute: bool = False
    micro_batches: int = 1
    context: int = 1
    experts: int = 1
    attention: Way = "zigzag"
    rows: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    replicas: tuple[int, ...] = ()
    deals: bool = False

    @property
    def summing(self) -> int:
        """Ranks that sum their gradients."""
        return self.data * self.context

    @property
    def sharing(self) -> int:
        """Ranks over which experts or tables are spread."""
        return self.experts or self.summing

    @property
    def published(self) -> PipelineSchedule:
        """The pipeline's schedule."""
        return SCHEDULES[self.schedule]

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return self.replicas or (self.data,) * self.pipe

    @property
    def grid(self) -> Layout:
        """Its grid of ranks."""
        return Layout(self.widths, self.tensor, self.context, self.experts, self.rows)

    @property
    def parts(self) -> int:
        """Micro-batches of a step, over all replicas."""
        return self.micro_batches * lcm(*self.widths)

    def stage(self, width: int) -> "Candidate":
        """The layout if all stages had this many replicas, each with its part of the step."""
        return replace(self, data=width, micro_batches=self.parts // width, replicas=())

    def dealt(self, replicas: tuple[int, ...]) -> "Candidate":
        """The layout with so many replicas of each stage."""
        unequal = replicas if len(set(replicas)) > 1 else ()
        width, pipe = max(replicas), len(replicas)
        zero = self.zero if width * self.context > 1 else 0  # else nobody shares
        return replace(self, pipe=pipe, data=width, replicas=unequal, deals=False, zero=zero)

    def pipeline(self) -> Pipeline:
        """The pipeline of a step; replicas that do the same at the same time are one."""
        alike = gcd(*self.widths)
        widths = tuple(width // alike for width in self.widths)
        return self.published.pipeline(widths, self.parts // alike, self.chunks)

    def keys(self) -> dict[str, object]:
        """The keys of [parallel] that choose the layout, and defaults of keys that it would not
        read."""
        usual = Parallel()
        return {
            **{key: getattr(usual, key) for key in _UNREAD},
            "pipe": 1 if self.replicas else self.pipe,
            "tensor": self.tensor,
            "sequence": self.sequence,
            "data": 0 if self.replicas else self.data,
            "replicas": self.replicas,
            "context": 1 if self.rows else self.context,
            "space": self.context if self.rows else 1,
            "attention": self.attention,
            "experts": self.experts or 1,
            "zero": self.zero,
            "recompute": self.recompute,
            "schedule": self.schedule,
            "chunks": self.chunks if self.schedule == "interleaved" else 1,
        }

    def __str__(self) -> str:
        data = "-".join(map(str, self.replicas)) or self.data
        text = axes(data, self.pipe, self.tensor, self.context, self.experts, rows=self.rows)
        extras: list[str] = [self.attention] * (self.context > 1 and not self.rows)
        extras += [key for key in ("sequence", "recompute") if getattr(self, key)]
        if self.zero:
            extras.append(f"ZeRO-{self.zero}")
        return ", ".join([text, *extras, counted(self.micro_batches, "micro-batch")])
