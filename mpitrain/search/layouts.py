"""Layouts of a job on a cluster, the fastest first, and why the others cannot be."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import nsmallest

import numpy as np

from mpitrain.metrics.words import digits
from mpitrain.nn.positions import Way
from mpitrain.pipeline.replay import replay
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.search.axes import Axes
from mpitrain.search.candidates import Candidate
from mpitrain.search.cuts import Cut
from mpitrain.search.layers import LayerCost
from mpitrain.search.machine import Machine
from mpitrain.search.prices import Prices, chunks_of, levelled
from mpitrain.search.stages import Numerics, ReplicaExchange, StageCosts
from mpitrain.search.step import PredictedStep, SimulatedStep
from mpitrain.search.sums import LayerSums


@dataclass(frozen=True)
class Found:
    """A layout that fits, and its step by simulation.

    Attributes:
        layout: the layout.
        sizes: layers of each chunk, in the order of the model.
        step: the predicted step.
    """

    layout: Candidate
    sizes: tuple[int, ...]
    step: PredictedStep

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.step.seconds

    @property
    def memory(self) -> float:
        """Bytes of the rank that holds most."""
        return max(self.step.memory)

    def keys(self) -> dict[str, object]:
        """The keys of a job that choose the layout."""
        own = {f"parallel.{key}": value for key, value in self.layout.keys().items()}
        own["parallel.partition"] = self.sizes if self.layout.pipe > 1 else "even"
        return own | {"train.micro_batches": self.layout.micro_batches}

    def __str__(self) -> str:
        if self.layout.pipe == 1:
            return str(self.layout)
        layers = "-".join(map(str, self.sizes))
        return f"{self.layout}, layers {layers}, {self.layout.schedule}"


#: Says why a layout does not go together with the job's other methods; empty if it does.
Refusal = Callable[[Candidate], str]


@dataclass(frozen=True)
class Search:
    """A job for which layouts are sought.

    Attributes:
        layers: costs of the model's layers, for one sample.
        machine: the cluster.
        batch: samples of a step.
        numerics: bytes of numbers.
        axes: parts of the model that ranks can share.
        exchange: says what the replicas of a layout, or of its widest stage, exchange.
        refused: why candidates cannot be, with their number.
        priced: candidates whose layers were cut, and those that were looked at.
    """

    layers: Sequence[LayerCost]
    machine: Machine
    batch: int
    numerics: Numerics
    axes: Axes = field(default_factory=Axes)
    exchange: Callable[[Candidate], ReplicaExchange] = lambda layout: ReplicaExchange()
    refused: Counter[str] = field(default_factory=Counter)
    priced: Counter[bool] = field(default_factory=Counter)

    def slowed(self, factor: float) -> "Search":
        """The search if computation took ``factor`` times as long."""
        machine = replace(
            self.machine,
            rate=self.machine.rate / factor,
            stream=self.machine.stream / factor,
            launch=self.machine.launch * factor,
        )
        layers = [replace(one, fixed=one.fixed * factor) for one in self.layers]
        numerics = replace(self.numerics, stepping=self.numerics.stepping * factor)

        def exchange(layout: Candidate) -> ReplicaExchange:
            found = self.exchange(layout)
            return replace(found, coding=found.coding * factor)

        return replace(self, layers=layers, machine=machine, numerics=numerics, exchange=exchange)

    @cached_property
    def sums(self) -> LayerSums:
        """Sums of the layers' costs over each stage, whose ranks share no samples."""
        return LayerSums.over(self.layers)

    @cached_property
    def _in_rows(self) -> Callable[[int], LayerSums]:
        """Gives these sums where so many ranks share the rows."""
        return cache(lambda ranks: LayerSums.over([one.in_rows(ranks) for one in self.layers]))

    @cached_property
    def _in_context(self) -> Callable[[int, Way], LayerSums]:
        """Gives these sums where so many ranks share the positions in this way."""
        return cache(
            lambda ranks, way: LayerSums.over([one.in_context(ranks, way) for one in self.layers])
        )

    def candidates(self) -> Iterator[Candidate]:
        """All layouts of the ranks, whether they fit or not."""
        ranks, layers = self.machine.ranks, len(self.layers)
        return self.axes.candidates(ranks, layers, self.batch, self.refused)

    def fastest(self, count: int = 10, refusal: Refusal = lambda candidate: "") -> list[Found]:
        """The ``count`` fastest layouts: cut by the model, then ranked by simulation.

        Layouts are cut in the order of what they take at least, until that is more than what the
        best ones take.

        Args:
            count: number of layouts.
            refusal: why a layout cannot be used.
        """
        replayed = cache(lambda name, pipeline: replay(SCHEDULES[name].generate, pipeline))
        timed = []
        for _, layout, cut in self.cheapest(4 * count, refusal):
            sizes = levelled(self, layout, cut.sizes) if layout.chunks > 1 else cut.sizes
            report = replayed(layout.schedule, layout.pipeline())
            costs = [self.costs(layout.stage(width)) for width in layout.widths]
            cuts = chunks_of(sizes, layout.pipeline())
            step = SimulatedStep(costs, cuts, report, self.batch)
            if max(step.memory) <= self.machine.memory:
                timed.append((step.seconds, layout, sizes, step))
        fastest = nsmallest(count, timed, key=lambda own: own[0])
        return [Found(layout, sizes, step.predicted()) for _, layout, sizes, step in fastest]

    def cheapest(
        self, most: int, refusal: Refusal = lambda candidate: ""
    ) -> list[tuple[float, Candidate, Cut]]:
        """The ``most`` layouts of the lowest prices, which :class:`Prices` gives."""
        candidates, prices = list(self.candidates()), Prices(self)
        least = [(own.deals, prices.least(own), at) for at, own in enumerate(candidates)]
        self.priced[False] += len(least)
        limit = self.machine.memory
        beyond = f"stages beyond {digits(limit / 2**30)} GiB of a rank"
        if limit == np.inf:
            beyond = "no stages that all ranks and samples can be dealt to"
        kept: list[tuple[float, int, Candidate, Cut]] = []
        # Simple layouts first: a level of ZeRO that wins nothing stays behind its equals.
        for _, bound, at in sorted(least):
            worst, candidate = kept[-1][0] if len(kept) == most else np.inf, candidates[at]
            if bound == np.inf:
                self.refused[beyond] += 1
            if bound >= worst:
                continue
            if why := refusal(candidate):
                self.refused[why] += 1
                continue
            self.priced[True] += 1
            cut = prices.cut(candidate, worst)
            if cut is None:
                self.refused[beyond] += 1
            elif cut.seconds < worst:
                own = candidate.dealt(cut.replicas) if candidate.deals else candidate
                if (own, cut.sizes) not in [(known[2], known[3].sizes) for known in kept]:
                    kept = nsmallest(most, [*kept, (cut.seconds, at, own, cut)], lambda k: k[:2])
        return [(seconds, own, cut) for seconds, _, own, cut in kept]

    def costs(self, layout: Candidate) -> StageCosts:
        """The costs of a layout's stages, all as wide as ``layout.data``."""
        samples = self.batch / layout.data / layout.micro_batches
        ours = self.exchange(layout)
        sums = self.sums
        if layout.rows:
            sums = self._in_rows(layout.context)
        elif layout.context > 1:
            sums = self._in_context(layout.context, layout.attention)
        return StageCosts(sums, self.machine, layout, samples, self.numerics, ours)
