"""Actions of a rank of a pipeline, from which its messages follow.

The layers of a model are cut into ``stages * chunks`` virtual stages, which a placement deals to
the stages.  A rank's Forward takes a micro-batch's activation from the virtual stage before (the
first one reads the data instead), and hands its own on; gradients go the other way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple


@dataclass(frozen=True, slots=True)
class _Pass:
    """A micro-batch passes a chunk of the stage's layers: ``F3``; ``1F3`` in chunk 1."""

    letter: ClassVar[str]
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk or ''}{self.letter}{self.micro_batch}"


class Forward(_Pass):
    """Take a micro-batch forward."""

    __slots__ = ()
    letter = "F"


class Backward(_Pass):
    """Take it backward: gradients by the input and by the parameters."""

    __slots__ = ()
    letter = "B"


class BackwardInput(_Pass):
    """The first half of that, for which the stage before waits."""

    __slots__ = ()
    letter = "I"


class BackwardWeight(_Pass):
    """The second half, for which nobody waits (Qi et al. 2024)."""

    __slots__ = ()
    letter = "W"


@dataclass(frozen=True, slots=True)
class Update:
    """Reduce the gradients over the replicas, and step; the number counts from 0."""

    letter: ClassVar[str] = "U"
    number: int

    def __str__(self) -> str:
        return f"{self.letter}{self.number}"


Compute = Forward | Backward | BackwardInput | BackwardWeight
Action = Compute | Update

#: ``placement(stages, virtual)`` is the stage of a virtual stage.
Placement = Callable[[int, int], int]


def loop(stages: int, virtual: int) -> int:
    """Round and round: stage s has s, s + stages, s + 2 stages ..."""
    return virtual % stages


def vee(stages: int, virtual: int) -> int:
    """Down and up again, as a V: stage s has s and 2 stages - 1 - s."""
    turn, at = divmod(virtual, stages)
    return stages - 1 - at if turn % 2 else at


class Hop(NamedTuple):
    """A virtual stage, and the replica and chunk that has it for a micro-batch."""

    stage: int
    replica: int
    chunk: int
    virtual: int

    @property
    def place(self) -> tuple[int, int]:
        return self.stage, self.replica


@dataclass(frozen=True)
class Pipeline:
    """The pipeline that a schedule is for.

    Attributes:
        replicas: number of replicas of each stage; replica m modulo this number computes
            micro-batch m.
        micro_batches: number in one run of the schedule, over all replicas.
        chunks: pieces of the model on each stage.
        accumulate: micro-batches of each replica in an update, for schedules that update as they
            go.
        placement: stage of each virtual stage; all stages have equally many.
    """

    replicas: tuple[int, ...]
    micro_batches: int
    chunks: int = 1
    accumulate: int = 1
    placement: Placement = loop

    @property
    def stages(self) -> int:
        """Ranks in a row."""
        return len(self.replicas)

    @property
    def virtual_stages(self) -> int:
        """Parts that the model is cut into."""
        return self.stages * self.chunks

    @cached_property
    def dealt(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stage of each chunk of each stage, in ascending order."""
        stages = [self.placement(self.stages, v) for v in range(self.virtual_stages)]
        return tuple(
            tuple(v for v, found in enumerate(stages) if found == stage)
            for stage in range(self.stages)
        )

    def at(self, virtual: int, micro_batch: int) -> Hop:
        """The place of a micro-batch in a virtual stage."""
        stage = self.placement(self.stages, virtual)
        chunk = self.dealt[stage].index(virtual)
        return Hop(stage, self.replica(stage, micro_batch), chunk, virtual)

    def beside(self, stage: int, action: Action) -> tuple[Hop | None, Hop | None]:
        """The places where the input of a stage's action is made, and that take its output.

        None: the data and the loss, or nothing.
        """
        if isinstance(action, (Update, BackwardWeight)):
            return None, None
        virtual, step = self.dealt[stage][action.chunk], 1 if isinstance(action, Forward) else -1
        source, target = (
            self.at(other, action.micro_batch) if 0 <= other < self.virtual_stages else None
            for other in (virtual - step, virtual + step)
        )
        return source, target

    def own(self, stage: int, replica: int) -> range:
        return range(replica, self.micro_batches, self.replicas[stage])

    def replica(self, stage: int, micro_batch: int) -> int:
        return micro_batch % self.replicas[stage]

    def places(self) -> Iterator[tuple[int, int]]:
        for stage, count in enumerate(self.replicas):
            for replica in range(count):
                yield stage, replica
