"""Layers and replicas of each stage of a pipeline (PipeDream, Narayanan 2019).

The stage of layers i..j on m workers takes, a micro-batch,

    T(i..j, m) = max(compute(i..j), synchronise(i..j, m)) / m

where ``synchronise`` is the all-reduce of its weights, 2 (m-1)/m of their bytes over a link, and
the pipeline is as fast as its slowest stage or message:

    A(j, m) = min over i, m' of max(A(i, m - m'), 2 activation(i) / bandwidth, T(i+1..j, m'))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from mpitrain.pipeline.profiles import LayerProfile


class NoPartition(ValueError):
    """No partition fits: the message says what is too small."""


@dataclass(frozen=True)
class StagePlan:
    """Layers ``first <= i < stop`` on some replicas, and the seconds of a micro-batch there."""

    first: int
    stop: int
    replicas: int
    seconds: float


@dataclass(frozen=True)
class StagePlans:
    """Stages in a row, and seconds from one micro-batch to the next, once the pipeline is full."""

    stages: tuple[StagePlan, ...]
    seconds: float

    @property
    def configuration(self) -> str:
        """As the paper writes it: ``2-1-1``."""
        return "-".join(str(stage.replicas) for stage in self.stages)


class Costs:
    """Costs of stages by a profile, over links of ``bandwidth`` bytes/s between any two workers."""

    def __init__(
        self,
        profile: Sequence[LayerProfile],
        bandwidth: float,
        memory_bytes: float | None = None,
    ) -> None:
        self.profile = profile
        self.bandwidth = bandwidth
        self.memory_bytes = memory_bytes
        self._seconds = np.cumsum([0.0, *(layer.seconds for layer in profile)])
        #: Seconds of a micro-batch on one worker.
        self.total = float(self._seconds[-1])
        self._weights = np.cumsum([0.0, *(layer.parameter_bytes for layer in profile)])
        self._activations = np.cumsum([0.0, *(layer.activation_bytes for layer in profile)])

    def stage(self, first: int, stop: int, replicas: int) -> float:
        """Seconds a micro-batch of layers ``first <= i < stop`` on ``replicas`` workers."""
        compute = self._seconds[stop] - self._seconds[first]
        weights = self._weights[stop] - self._weights[first]
        reduce = 2 * (replicas - 1) / replicas * weights / self.bandwidth
        return float(max(compute, reduce)) / replicas

    def message(self, layer: int) -> float:
        """Seconds for a layer's activation to go on and its gradient to come back."""
        return 2 * self.profile[layer].activation_bytes / self.bandwidth

    def fits(self, first: int, stop: int, in_flight: int) -> bool:
        """Whether a stage fits into a worker's memory.

        It holds weights, gradients and two slots of state, and for each micro-batch in flight
        stashed weights and activations.
        """
        if self.memory_bytes is None:
            return True
        weights = self._weights[stop] - self._weights[first]
        activations = self._activations[stop] - self._activations[first]
        return bool(4 * weights + in_flight * (weights + activations) <= self.memory_bytes)


def partition(costs: Costs, workers: int, *, replicated: bool = True) -> StagePlans:
    """The fastest pipeline on ``workers``, all of which it uses; ``replicated``: stages may share.

    Cost: O(layers^2 workers^2).

    Raises:
        NoPartition: no stage fits into the memory of a worker.
    """
    layers = len(costs.profile)
    # From the end, so that the workers after a stage, which say how much is in flight, are known.
    best: dict[tuple[int, int], tuple[float, StagePlan | None]] = {(layers, 0): (0.0, None)}
    for first in reversed(range(layers)):
        for m in range(1, workers + 1):
            found = _best_from(costs, best, first, m, m if replicated else 1)
            if found is not None:
                best[first, m] = found
    if (0, workers) not in best:
        raise NoPartition(
            f"{layers} layers do not fit on {workers} workers of {costs.memory_bytes} bytes"
        )
    stages, first, m = [], 0, workers
    while first < layers:
        stage = best[first, m][1]
        if stage is None:
            break
        stages.append(stage)
        first, m = stage.stop, m - stage.replicas
    return StagePlans(tuple(stages), best[0, workers][0])


def balanced_partition(profile: Sequence[LayerProfile], stages: int) -> list[int]:
    """Numbers of layers of each stage such that the slowest stage is as fast as possible.

    Raises:
        NoPartition: there are fewer layers than stages.
    """
    if len(profile) < stages:
        raise NoPartition(f"{len(profile)} layers cannot be cut into {stages} stages")
    found = partition(Costs(profile, inf), stages, replicated=False)
    return [stage.stop - stage.first for stage in found.stages]


def _best_from(
    costs: Costs,
    best: dict[tuple[int, int], tuple[float, StagePlan | None]],
    first: int,
    workers: int,
    most: int,
) -> tuple[float, StagePlan] | None:
    """The fastest way to put layers from ``first`` on ``workers``, at most ``most`` on the first
    stage."""
    found: tuple[float, StagePlan] | None = None
    layers = len(costs.profile)
    for replicas in range(1, most + 1):
        in_flight = -(-workers // replicas)
        for stop in range(first + 1, layers + 1):
            rest = best.get((stop, workers - replicas))
            if rest is None or not costs.fits(first, stop, in_flight):
                continue
            own = costs.stage(first, stop, replicas)
            message = costs.message(stop - 1) if stop < layers else 0.0
            seconds = max(own, message, rest[0])
            if found is None or seconds < found[0]:
                found = seconds, StagePlan(first, stop, replicas, own)
    return found


def describe(costs: Costs, found: StagePlans) -> str:
    lines = [
        f"{found.configuration}: {1e3 * found.seconds:.3f} ms a micro-batch, "
        f"{costs.total / found.seconds:.2f}x one worker"
    ]
    for index, stage in enumerate(found.stages):
        names = costs.profile[stage.first].name, costs.profile[stage.stop - 1].name
        lines.append(
            f"  stage {index}: layers {stage.first}-{stage.stop - 1} ({names[0]} ... {names[1]}) "
            f"on {stage.replicas}, {1e3 * stage.seconds:.3f} ms"
        )
    return "\n".join(lines)
