"""Prices of layouts: what each takes at least, and its best cut into stages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from collectives.analysis import LinkCost
from mpitrain.pipeline.actions import Pipeline
from mpitrain.search.candidates import Candidate
from mpitrain.search.cuts import Cut, Seconds, fastest_cut
from mpitrain.search.stages import StageCosts
from mpitrain.search.sums import Span

if TYPE_CHECKING:
    from mpitrain.search.layouts import Search


class Prices:
    """Prices of the layouts of a search.

    A pipeline of p stages of v chunks, the slowest chunk of which takes t seconds a micro-batch,
    ends a step of m micro-batches after

        m v t + a (sum of all chunks - v t)

    where its schedule's ranks are idle for a times as long as 1F1B's.  Each chunk of a stage may
    use a v-th of a rank's memory.
    """

    def __init__(self, search: "Search") -> None:
        self._search, machine = search, search.machine
        # A machine on which all costs are proportional to what there is to do.
        inside, network = (LinkCost(0.0, own.beta) for own in (machine.inside, machine.network))
        self._hasty = replace(machine, launch=0.0, call=0.0, inside=inside, network=network)
        # Schedules, of which there are many, share what all layers take together.
        self._alike = cache(self._together)

    def least(self, own: Candidate) -> float:
        """Seconds that no cut of a layout falls below; infinite if none fits in memory."""
        machine = self._search.machine
        if own.deals:
            costs = replace(self._search.costs(own), machine=self._hasty)
            whole = costs.sums.whole
            state = self._search.costs(replace(own, data=1)).state(whole)
            moved = replace(whole, fixed=0.0)
            seconds = own.micro_batches * (costs.forward(moved) + costs.backward(moved))
            # A micro-batch passes all layers, whatever ranks they have.
            seconds = seconds + 3 * (machine.launch * whole.layers + whole.fixed)
            return float(seconds if state <= own.data * machine.memory else np.inf)
        state, kept, seconds, _ = self._alike(replace(own, schedule="1f1b", chunks=1))
        held, m = own.published.held, own.micro_batches
        least = min(held(own.pipe, m, own.chunks, stage) for stage in (0, own.pipe - 1))
        if state + kept * least / own.chunks > own.pipe * machine.memory:
            return float(np.inf)
        idle = self._idle(own)
        return seconds * (idle + (own.micro_batches - idle) / own.pipe)

    def cut(self, own: Candidate, worst: float = np.inf) -> Cut | None:
        """The fastest cut of a layout; None: none fits in memory.

        ``worst``: see :func:`~mpitrain.search.cuts.fastest_cut`.
        """
        if own.deals:
            return self._dealt(own, worst)
        chunks, m, parts = own.chunks, own.micro_batches, own.pipe * own.chunks
        costs = self._search.costs(own)
        times = _times(costs)
        fitting = _fitting(costs, times, chunks)

        def of(_: int, used: int) -> Seconds:
            stage = own.published.placement(own.pipe, parts - used)
            return fitting(own.published.held(own.pipe, m, chunks, stage))

        idle = self._idle(own)
        micro_batches = 1 + (m / idle - 1) * chunks
        found = fastest_cut({1: times}, of, parts, micro_batches, worst / idle)
        return found and replace(found, seconds=idle * found.seconds)

    def _dealt(self, own: Candidate, worst: float) -> Cut | None:
        """The fastest cut into stages of any width, which take all of a step's samples in turn."""
        search, m = self._search, own.micro_batches
        widths = [width for width in range(1, own.data + 1) if search.batch // m % width == 0]
        costs = {width: search.costs(replace(own, data=width)) for width in widths}
        times = {width: _times(costs[width]) for width in widths}
        fitting = {width: _fitting(costs[width], times[width]) for width in widths}

        def of(width: int, used: int) -> Seconds:
            return fitting[width](min(m, -(-used // width)))

        return fastest_cut(times, of, own.data, m, worst)

    def _together(self, own: Candidate) -> tuple[float, float, float, tuple[float, float, float]]:
        """All layers' bytes of state and of activations, seconds, and times of the passes."""
        costs = self._search.costs(own)
        whole = costs.sums.whole
        forward, backward = costs.forward(whole), costs.backward(whole)
        weights = (backward - forward * own.recompute) / 2
        passes = forward, backward - weights, weights
        return costs.state(whole), costs.activations(whole), float(costs.seconds(whole)), passes

    def _idle(self, own: Candidate) -> float:
        """Time in which the ranks of equal stages are idle, over that of 1F1B."""
        if own.pipe == 1:
            return 1.0
        *_, times = self._alike(replace(own, schedule="1f1b", chunks=1))
        share = own.published.bubble(own.pipe, own.micro_batches, own.chunks, *times)
        return share * own.micro_batches / (1 - share) / (own.pipe - 1)


def levelled(search: "Search", own: Candidate, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of chunks after layers went from the slowest stages to others, while that helps."""
    costs, pipeline = search.costs(own), own.pipeline()
    times = _times(costs)
    held = [own.published.held(own.pipe, own.micro_batches, own.chunks, s) for s in range(own.pipe)]

    def stages(sizes: Sequence[int]) -> list[float]:
        return [sum(times[span] for span in spans) for spans in chunks_of(sizes, pipeline)]

    def fits(sizes: Sequence[int]) -> bool:
        of = map(costs.sums.of, chunks_of(sizes, pipeline))
        memory = (costs.memory(sums, most, own.chunks) for sums, most in zip(of, held))
        return max(memory) <= search.machine.memory

    def better(sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        now = stages(sizes)
        order = sorted(range(own.pipe), key=now.__getitem__)
        for fast in order[:-1]:
            for source, target in product(pipeline.dealt[order[-1]], pipeline.dealt[fast]):
                tried = list(sizes)
                tried[source] -= 1
                tried[target] += 1
                after = stages(tried) if tried[source] else [np.inf]
                shorter = max(after), sum(t * t for t in after)
                if shorter < (max(now), sum(t * t for t in now)) and fits(tried):
                    return tuple(tried)
        return None

    while found := better(sizes):
        sizes = found
    return sizes


def chunks_of(sizes: Sequence[int], pipeline: Pipeline) -> list[list[Span]]:
    """The layers of the chunks of each stage."""
    spans: list[Span] = list(pairwise(np.cumsum([0, *sizes]).tolist()))
    return [[spans[virtual] for virtual in own] for own in pipeline.dealt]


def _times(costs: StageCosts) -> Seconds:
    """Seconds of each stage; infinite where it has no layer."""
    return np.where(costs.sums.layers > 0, costs.seconds(costs.sums), np.inf)


def _fitting(costs: StageCosts, times: Seconds, chunks: int = 1) -> Callable[[int], Seconds]:
    """Tells the times of stages, infinite where so many micro-batches do not fit in memory; a chunk
    may use its part of a rank's."""
    state, activations = costs.state(costs.sums) * chunks, costs.activations(costs.sums)

    @cache
    def fitting(held: int) -> Seconds:
        memory = state + held * activations + costs.working
        return np.where(memory <= costs.machine.memory, times, np.inf)

    return fitting
