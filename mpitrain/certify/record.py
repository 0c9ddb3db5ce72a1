"""The first steps of a program, and how a run is made to record them."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.arrays import Array

#: Mistakes that are planted: gradients times the number of ranks and 1, some of them 0, a
#: sample in the place of its neighbour, the second step with the weights of the first.
MUTATIONS = ("scale", "drop", "repeat", "stale")


class Enough(BaseException):
    """Ends a program after the last step that is compared, on all ranks."""


class Abstained(Exception):
    """No verdict can be found; the message says why."""


@dataclass
class Recorded:
    """A step: samples by number or digest, mean loss, gradients before clipping, parameters and
    running values after it by name; of the last two, rank 0 alone knows all."""

    samples: list[Any]
    loss: float
    gradients: Mapping[str, Array]
    parameters: Mapping[str, Array]


@dataclass
class Record:
    """A run.

    Attributes:
        initial: parameters and running values before the first step, moved where the session says.
        steps: the steps.
        is_ours: whether the trainer gives samples, initial values and random numbers, which have to
            be the same in every layout.
        eps: relative distance of neighbouring numbers in the type that computes.
        narrow: the largest such distance in a pass of torch, and the name of its type.
        draws: who draws random numbers in a pass, as the class of a module; empty: nobody.
        has_means: whether layers take means over samples, as batch norm does.
    """

    initial: dict[str, Array] = field(default_factory=dict)
    steps: list[Recorded] = field(default_factory=list)
    is_ours: bool = False
    eps: float = 0.0
    narrow: tuple[float, str] = (0.0, "")
    draws: str = ""
    has_means: bool = False


@dataclass
class Session:
    """A run on this rank.

    Attributes:
        last: number of the last step.
        tables: tables of a job, which win over the program's.
        is_double: whether torch's usual type is float64.
        batches: factor on the batch size of torch's loaders.
        moved: part by which the initial parameters are moved.
        mutation: mistake that is planted; empty: none.
        save_at: step after which a checkpoint is written; 0: none.
        save_to: folder for it, as a job's ``run.dir``.
        goes_on: whether the run goes on from the checkpoint.
        opened: functions that free what the run has made.
        watch: what notes the steps of torch's optimisers; None: nothing does.
    """

    last: int
    tables: Mapping[str, Mapping[str, Any]]
    is_double: bool
    batches: int = 1
    moved: float = 0.0
    mutation: str = ""
    save_at: int = 0
    save_to: str = ""
    goes_on: bool = False
    opened: list[Callable[[], None]] = field(default_factory=list)
    watch: Any = None
    record: Record = field(default_factory=Record)

    def move(self, flat: Any) -> None:
        """Move initial parameters, neighbours in two directions."""
        flat[::2] *= 1 + self.moved
        flat[1::2] *= 1 - self.moved


class _ThisThread(threading.local):
    """The session of this thread, which is a rank."""

    session: Session | None = None


HERE = _ThisThread()
