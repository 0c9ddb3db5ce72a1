"""Layers and replicas of each stage of a pipeline (PipeDream, Narayanan 2019).

The stage of layers i..j on m workers takes, a micro-batch,

    T(i..j, m) = max(compute(i..j), synchronise(i..j, m)) / m

or the sum of both, where no computation hides the exchange.  ``synchronise`` is the all-reduce of
its weights, 2 (m-1)/m of their bytes over a link, or the push and pull to servers on the same
workers, 4 (m-1)/m of them.  The pipeline is as fast as its slowest stage or message:

    A(j, m) = min over i, m' of max(A(i, m - m'), 2 activation(i) / bandwidth, T(i+1..j, m'))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, lcm

import numpy as np

from mpitrain.metrics.words import in_words
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
    """Stages in a row.

    Attributes:
        seconds: from one micro-batch to the next, once the pipeline is full.
        stages: in order.
    """

    seconds: float
    stages: tuple[StagePlan, ...]

    @property
    def configuration(self) -> str:
        """As the paper writes it: ``2-1-1``."""
        return "-".join(map(str, self.replicas))

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(stage.stop - stage.first for stage in self.stages)


@dataclass(frozen=True)
class TwoLevelLinks:
    """Links of two levels, in bytes/s.

    Attributes:
        network: between two nodes.
        inside: between two workers of a node.
        nodes: node of each worker, in the order of the stages; empty: each is its own node.
    """

    network: float
    inside: float = inf
    nodes: Sequence[int] = ()

    def slowest(self, workers: slice) -> float:
        """The slowest link among some workers."""
        return self.inside if len(set(self.nodes[workers])) == 1 else self.network


#: ``sums(replicas)``: how often a stage sums its gradients in a micro-batch of each replica.
Sums = Callable[[int], float]


class Costs:
    """Costs of stages by a profile.

    Attributes:
        profile: the layers.
        links: links between workers.
        memory_bytes: memory of a worker; None: no limit.
        total: seconds of a micro-batch on one worker.
    """

    def __init__(
        self,
        profile: Sequence[LayerProfile],
        links: TwoLevelLinks | float,
        memory_bytes: float | None = None,
        *,
        servers: bool = False,
        hidden: bool = True,
        sums: Sums = lambda replicas: 1.0,
    ) -> None:
        """Nothing is computed yet.

        Args:
            profile: the layers.
            links: links; a number: bytes/s between any two workers.
            memory_bytes: memory of a worker; None: no limit.
            servers: workers push gradients to servers and pull weights, instead of an all-reduce.
            hidden: a stage computes during its all-reduce.
            sums: see :data:`Sums`.
        """
        self.profile = profile
        self.links = links if isinstance(links, TwoLevelLinks) else TwoLevelLinks(links)
        self.memory_bytes = memory_bytes
        self._moved, self._sums, self._hidden = 4 if servers else 2, sums, hidden
        self._seconds = np.cumsum([0.0, *(layer.seconds for layer in profile)])
        self.total = float(self._seconds[-1])
        self._weights = np.cumsum([0.0, *(layer.parameter_bytes for layer in profile)])
        self._activations = np.cumsum([0.0, *(layer.activation_bytes for layer in profile)])

    def stage(self, first: int, stop: int, replicas: int, worker: int = 0) -> float:
        """Seconds a micro-batch of layers ``first <= i < stop`` on workers from ``worker`` on."""
        compute = self._seconds[stop] - self._seconds[first]
        link = self.links.slowest(slice(worker, worker + replicas))
        reduce = self._sums(replicas) * self.synchronised(first, stop, replicas) / replicas / link
        return float(max(compute, reduce) if self._hidden else compute + reduce) / replicas

    def synchronised(self, first: int, stop: int, replicas: int) -> float:
        """Bytes that all replicas of a stage send in one sum of their gradients."""
        return float(self._moved * (replicas - 1) * (self._weights[stop] - self._weights[first]))

    def sent(self, stages: Sequence[StagePlan]) -> float:
        """Bytes that all workers send for a micro-batch: activations, gradients, and their sums."""
        found = 2 * sum(self.profile[stage.stop - 1].activation_bytes for stage in stages[:-1])
        for stage in stages:
            own = self.synchronised(stage.first, stage.stop, stage.replicas)
            found += self._sums(stage.replicas) * own / stage.replicas
        return found

    def message(self, layer: int, workers: slice = slice(0)) -> float:
        """Seconds for a layer's activation to go on and its gradient to come back.

        ``workers``: ranks of both stages.
        """
        return 2 * self.profile[layer].activation_bytes / self.links.slowest(workers)

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


#: The costs of stages by the numbers of their replicas, on which it depends how often they sum.
CostsOf = Callable[[Sequence[int]], Costs]


def partition(costs: Costs, workers: int | Sequence[int]) -> StagePlans:
    """The fastest pipeline on ``workers``, all of which it uses.

    The memory is enough for as many micro-batches in flight as the paper has, the workers from a
    stage on over its replicas; a schedule may have some more between stages of unequal width.

    Cost: O(layers^2 workers^2); with links of two levels O(layers^2 workers^3).

    Args:
        costs: costs of stages.
        workers: number of workers, or of those of each stage.

    Raises:
        NoPartition: no stage fits into the memory of a worker, or there are fewer layers than
            stages.
    """
    layers = len(costs.profile)
    shape = () if isinstance(workers, int) else tuple(workers)
    if layers < len(shape):
        raise NoPartition(f"{layers} layers cannot be cut into {len(shape)} stages")
    total = workers if isinstance(workers, int) else sum(workers)
    #: Replicas that a stage may have, by the number of workers from it on.
    allowed: dict[int, Sequence[int]] = {m: range(1, m + 1) for m in range(1, total + 1)}
    if shape:
        allowed = {sum(shape[stage:]): [own] for stage, own in enumerate(shape)}
    # From the end, so that the workers after a stage, which say how much is in flight, are known.
    best: _Best = {(layers, 0): [StagePlans(0.0, ())]}
    for first in reversed(range(layers)):
        for m, replicas in allowed.items():
            if found := _best_from(costs, best, first, slice(total - m, total), replicas):
                best[first, m] = found
    if (0, total) not in best:
        raise NoPartition(
            f"{layers} layers do not fit on {total} workers of {costs.memory_bytes} bytes"
        )
    return _fastest(best[0, total])


#: The fastest ways to put the layers from one on on so many workers.
_Best = dict[tuple[int, int], list[StagePlans]]


def _fastest(ways: Sequence[StagePlans]) -> StagePlans:
    return min(ways, key=lambda way: way.seconds)


def _best_from(
    costs: Costs, best: _Best, first: int, workers: slice, allowed: Sequence[int]
) -> list[StagePlans]:
    """The fastest way to put layers from ``first`` on some workers, with these ``allowed`` numbers
    on the first stage; with links of two levels, the fastest for each of them.

    The link from the stage before depends on it then.
    """
    layers, start, count = len(costs.profile), workers.start, workers.stop - workers.start
    ways = []
    for replicas in allowed:
        found: StagePlans | None = None
        in_flight = -(-count // replicas)
        for stop in range(first + 1, layers + 1):
            rests = best.get((stop, count - replicas), ())
            if not rests or not costs.fits(first, stop, in_flight):
                continue
            own = costs.stage(first, stop, replicas, start)
            for rest in rests:
                seconds = max(own, rest.seconds)
                if rest.stages:
                    reach = start + replicas + rest.stages[0].replicas
                    seconds = max(seconds, costs.message(stop - 1, slice(start, reach)))
                if found is None or seconds < found.seconds:
                    stage = StagePlan(first, stop, replicas, own)
                    found = StagePlans(seconds, (stage, *rest.stages))
        if found:
            ways.append(found)
    return ways if costs.links.nodes or not ways else [_fastest(ways)]


def partition_batch(
    profile: Sequence[LayerProfile],
    links: TwoLevelLinks,
    workers: int,
    micro_batches: int,
    *,
    synchronous: bool,
) -> tuple[StagePlans, CostsOf]:
    """The fastest pipeline for steps of one batch, whatever the number of replicas is.

    A step has ``micro_batches`` times the least common multiple of all replicas' numbers.  A stage
    sums its gradients once in it, or asynchronously after each ``micro_batches`` of a replica.

    Args:
        profile: the layers, with a ``micro_batches``-th of the batch.
        links: links between workers.
        workers: number of workers.
        micro_batches: micro-batches of each replica of the widest stage.
        synchronous: whether the pipeline drains at the end of a step.

    Returns:
        The stages, with the seconds of such a part of a batch, and the costs that chose them.
    """

    def costs(shape: Sequence[int]) -> Costs:
        parts = lcm(*shape)
        return Costs(
            profile, links, sums=lambda own: (own if synchronous else parts) / micro_batches
        )

    if synchronous:
        return partition(costs([workers]), workers), costs
    # How often a stage sums depends on all replicas, which depend on the costs.
    shapes = {partition(costs([guess]), workers).replicas for guess in range(1, workers + 1)}
    return _fastest([partition(costs(shape), shape) for shape in sorted(shapes)]), costs


def describe(found: StagePlans, costs_of: CostsOf) -> str:
    """For people."""
    workers = sum(found.replicas)
    costs, theirs = costs_of(found.replicas), costs_of([workers])
    bsp = StagePlan(0, len(costs.profile), workers, 0.0)
    alone = theirs.stage(bsp.first, bsp.stop, bsp.replicas)
    # Zero over zero: a profile without seconds, where nothing is sent.
    gains = [costs.total / own if own else 1.0 for own in (found.seconds, alone)]
    before, after = theirs.sent([bsp]), costs.sent(found.stages)
    share = f" ({after / before - 1:+.0%})" if before else ""
    lines = [
        f"{found.configuration}: {1e3 * found.seconds:.3f} ms a micro-batch, "
        f"{gains[0]:.2f}x one worker, {in_words(after)} sent{share}; "
        f"data parallelism: {gains[1]:.2f}x, {in_words(before)}"
    ]
    for index, stage in enumerate(found.stages):
        names = costs.profile[stage.first].name, costs.profile[stage.stop - 1].name
        lines.append(
            f"  stage {index}: layers {stage.first}-{stage.stop - 1} ({names[0]} ... {names[1]}) "
            f"on {stage.replicas}, {1e3 * stage.seconds:.3f} ms"
        )
    return "\n".join(lines)
