"""What a rank of a pipeline does, one action after another; messages follow from the actions.

The layers of a model are cut into ``stages * chunks`` virtual stages, of which stage s has number
s, s + stages, s + 2 stages ...  A rank receives a micro-batch's activation before its Forward (the
first virtual stage reads the data instead), and sends it on after it; gradients go the other way.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Take a micro-batch forward through a chunk of the stage's layers."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Take it backward: the gradients by the input and by the parameters."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """The first half of that, for which the stage before waits."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The second half, for which nobody waits (Qi et al. 2024)."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """Reduce the gradients over the replicas, and step; the number counts from 0."""

    number: int


Compute = Forward | Backward | BackwardInput | BackwardWeight
Action = Compute | Update


@dataclass(frozen=True)
class Pipeline:
    """What a schedule is for.

    Attributes:
        replicas: of each stage; micro-batch m of a stage is its replica's number m modulo these.
        micro_batches: of one run of the schedule, over all replicas.
        chunks: pieces of the model on each stage.
        accumulate: micro-batches of each update, for schedules that update as they go.
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
