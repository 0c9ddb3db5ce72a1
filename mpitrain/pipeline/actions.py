"""Actions of a rank of a pipeline, from which its messages follow.

The layers of a model are cut into ``stages * chunks`` virtual stages, of which stage s has number
s, s + stages, s + 2 stages ...  A rank receives a micro-batch's activation before its Forward (the
first virtual stage reads the data instead), and sends it on after it; gradients go the other way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


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


@dataclass(frozen=True)
class Pipeline:
    """The pipeline that a schedule is for.

    Attributes:
        replicas: number of replicas of each stage; replica m modulo this number computes
            micro-batch m.
        micro_batches: number in one run of the schedule, over all replicas.
        chunks: pieces of the model on each stage.
        accumulate: micro-batches in each update, for schedules that update as they go.
    """

    replicas: tuple[int, ...]
    micro_batches: int
    chunks: int = 1
    accumulate: int = 1

    @property
    def stages(self) -> int:
        """Ranks in a row."""
        return len(self.replicas)

    @property
    def virtual_stages(self) -> int:
        """Parts that the model is cut into."""
        return self.stages * self.chunks

    def own(self, stage: int, replica: int) -> range:
        """The micro-batches of a replica of a stage."""
        return range(replica, self.micro_batches, self.replicas[stage])

    def replica(self, stage: int, micro_batch: int) -> int:
        """The replica of a stage that has a micro-batch."""
        return micro_batch % self.replicas[stage]

    def places(self) -> Iterator[tuple[int, int]]:
        """All (stage, replica)."""
        for stage, count in enumerate(self.replicas):
            for replica in range(count):
                yield stage, replica
