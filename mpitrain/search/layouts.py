"""Layouts of a job on a cluster, the fastest first, and why the others cannot be."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import pairwise, product

import numpy as np

from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.search.cuts import Cut, fastest_cut
from mpitrain.search.layers import LayerCost
from mpitrain.search.machine import Machine
from mpitrain.search.stages import Candidate, Numerics, StageCosts
from mpitrain.search.step import PredictedStep, predict

#: Schedules that are compared for a pipeline; they train the same numbers.
_SCHEDULES = ("1f1b", "zero_bubble")


@dataclass(frozen=True)
class Found:
    """A layout that fits, and its step by simulation.

    Attributes:
        layout: the layout.
        cut: layers of each stage.
        schedule: the pipeline's schedule.
        step: the predicted step.
    """

    layout: Candidate
    cut: Cut
    schedule: str
    step: PredictedStep

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.step.seconds

    @property
    def memory(self) -> float:
        """Bytes of the rank that holds most."""
        return max(self.step.memory)

    def __str__(self) -> str:
        if self.layout.pipe == 1:
            return str(self.layout)
        return f"{self.layout}, layers {'-'.join(map(str, self.cut.sizes))}, {self.schedule}"


@dataclass(frozen=True)
class Search:
    """A job for which layouts are sought.

    Attributes:
        layers: costs of the model's layers, for one sample.
        machine: the cluster.
        batch: samples of a step.
        numerics: bytes of numbers.
        shareable: number that the ranks of a tensor group divide, such as that of the attention
            heads; 0 if the layers cannot be shared.
        positions: whether tensor ranks may share positions, too.
        refused: why candidates cannot be, with their number.
    """

    layers: Sequence[LayerCost]
    machine: Machine
    batch: int
    numerics: Numerics
    shareable: int = 0
    positions: bool = False
    refused: Counter[str] = field(default_factory=Counter)

    def candidates(self) -> Iterator[Candidate]:
        """All layouts of the ranks, whether they fit or not."""
        ranks = self.machine.ranks
        for pipe in _divisors(ranks):
            for tensor in _divisors(ranks // pipe):
                data = ranks // pipe // tensor
                if pipe > len(self.layers):
                    self.refused[f"more than {len(self.layers)} stages, one for each layer"] += 1
                elif tensor > 1 and (not self.shareable or self.shareable % tensor):
                    why = f"{self.shareable} heads that the tensor ranks do not divide"
                    self.refused[why if self.shareable else "layers that no ranks share"] += 1
                elif self.batch % data:
                    self.refused[f"replicas that do not divide the batch of {self.batch}"] += 1
                else:
                    yield from self._variants(pipe, data, tensor)

    def _variants(self, pipe: int, data: int, tensor: int) -> Iterator[Candidate]:
        levels = range(4) if data > 1 else range(1)
        most = 8 * pipe  # with more, a bubble is below an eighth
        parts = [m for m in _divisors(self.batch // data) if m <= most]
        sequences = (False, True) if self.positions and tensor > 1 else (False,)
        for sequence, zero, again, m in product(sequences, levels, (False, True), parts):
            yield Candidate(pipe, data, tensor, sequence, zero, again, m)

    def fastest(
        self, count: int = 10, candidates: Iterable[Candidate] | None = None
    ) -> list[Found]:
        """The ``count`` fastest layouts: cut by the model, then ranked by simulation.

        Args:
            count: number of layouts.
            candidates: layouts to choose from; all by default.
        """
        kept: list[tuple[float, Candidate, Cut]] = []
        # Simple layouts first: a level of ZeRO that wins nothing stays behind its equals.
        for candidate in candidates or self.candidates():
            worst = kept[-1][0] if len(kept) == 4 * count else np.inf
            cut = self._cut(candidate, worst)
            if cut is not None:
                kept = nsmallest(
                    4 * count, [*kept, (cut.seconds, candidate, cut)], key=lambda k: k[0]
                )
        found = [ran for _, candidate, cut in kept for ran in self._simulated(candidate, cut)]
        return nsmallest(count, found, key=lambda ran: ran.seconds)

    def costs(self, candidate: Candidate) -> StageCosts:
        """The costs of a layout's stages."""
        samples = self.batch / candidate.data / candidate.micro_batches
        return StageCosts(self.layers, self.machine, candidate, samples, self.numerics)

    def _cut(self, candidate: Candidate, worst: float) -> Cut | None:
        costs, m = self.costs(candidate), candidate.micro_batches
        workers = candidate.pipe * candidate.data

        def fits(replicas: int, behind: int) -> np.ndarray:
            return costs.memory(min(m, behind)) <= self.machine.memory

        seconds = {candidate.data: costs.seconds}
        cut = fastest_cut(seconds, fits, candidate.pipe, workers, m, worst)
        if cut is None:
            everything = fastest_cut(
                seconds, lambda *_: np.isfinite(costs.seconds), candidate.pipe, workers, m, worst
            )
            if everything is not None:
                self.refused[f"stages beyond {self.machine.memory / 2**30:.3g} GiB of a rank"] += 1
        return cut

    def _simulated(self, candidate: Candidate, cut: Cut) -> Iterator[Found]:
        costs, m = self.costs(candidate), candidate.micro_batches
        ends = np.cumsum([0, *cut.sizes]).tolist()
        spans = [[span] for span in pairwise(ends)]
        # All replicas do the same, at the same time.
        pipeline = Pipeline((1,) * candidate.pipe, m)
        for schedule in _SCHEDULES if candidate.pipe > 1 else _SCHEDULES[:1]:
            own = SCHEDULES[schedule]
            held = [own.held(candidate.pipe, m, 1, stage) for stage in range(candidate.pipe)]
            step = predict(
                [costs] * candidate.pipe, spans, pipeline, own.generate, held, self.batch
            )
            if max(step.memory) <= self.machine.memory:
                yield Found(candidate, cut, schedule, step)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
