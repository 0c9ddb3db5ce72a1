"""A layout for each layer: the exact optimum over chains of (layer, layout)."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from mpitrain.search.candidates import Candidate
from mpitrain.search.layouts import Refusal, Search
from mpitrain.search.stages import Numbers

#: Whole numbers: labels, layouts.
_Indices = Any


@dataclass(frozen=True)
class ByLayer:
    """The fastest layouts of the layers, without a pipeline.

    Attributes:
        layouts: the layout of each layer.
        seconds, memory: of a step, and bytes of a rank.
        uniform, uniform_seconds: the fastest layout that all layers have, by the same costs; None:
            none fits.
    """

    layouts: Sequence[Candidate]
    seconds: float
    memory: float
    uniform: Candidate | None
    uniform_seconds: float

    def lines(self, names: Sequence[str]) -> Iterator[str]:
        """The choice as text: runs of layers with one layout, and the best uniform layout."""
        yield f"\nby layer: {1e3 * self.seconds:.2f} ms a step"
        place = iter(names)
        for layout, run in groupby(self.layouts):
            own = [next(place) for _ in run]
            layers = own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}"
            yield f"  {layers}: {layout}"
        if self.uniform:
            yield f"one for all: {1e3 * self.uniform_seconds:.2f} ms, {self.uniform}"
        if len(set(self.layouts)) > 1:
            yield "the trainer gives all layers one layout; this one is a bound on what others win"


def by_layer(search: Search, refusal: Refusal = lambda layout: "") -> ByLayer | None:
    """The fastest choice of a layout for each layer, where all ranks have all layers.

    A layer's passes, its part of the update and what moves its activations from the layout before
    are summed; each layer hides its own sum of gradients alone.  All layers have as many
    micro-batches.  None: nothing fits in memory.
    """
    kinds: dict[int, list[Candidate]] = {}
    every = replace(search, refused=Counter()).candidates()
    for own in every:
        if own.pipe == 1 and not own.deals and not refusal(own):
            kinds.setdefault(own.micro_batches, []).append(own)
    found: list[ByLayer] = []
    for layouts in kinds.values():
        costs = [_costs(search, layout) for layout in layouts]
        seconds, memory = (np.array(part).T for part in zip(*costs, strict=True))
        moves = _moves(search, layouts)
        limit = search.machine.memory
        total, path = cheapest(seconds, moves, memory, limit)
        if not path:
            continue
        fits = memory.sum(axis=0) <= limit
        alike = np.where(fits, seconds.sum(axis=0), np.inf)
        best = int(alike.argmin())
        bytes_ = float(memory[np.arange(len(path)), path].sum())
        chosen = [layouts[at] for at in path]
        uniform = layouts[best] if fits.any() else None
        found.append(ByLayer(chosen, total, bytes_, uniform, float(alike[best])))
    if not found:
        return None
    alone = min(found, key=lambda one: one.uniform_seconds)
    fastest = min(found, key=lambda one: one.seconds)
    return replace(fastest, uniform=alone.uniform, uniform_seconds=alone.uniform_seconds)


def _costs(search: Search, layout: Candidate) -> tuple[Numbers, Numbers]:
    """Seconds of a step and bytes of each layer in a layout."""
    costs, m = search.costs(layout), layout.micro_batches
    each = replace(costs.sums.each(), tied=np.zeros(len(search.layers)))
    passes = costs.forward(each) + costs.backward(each)
    passes = passes - costs.machine.call * (2 + layout.recompute)  # of a stage, not of a layer
    memory = costs.state(each) + costs.activations(each) + costs.working / len(search.layers)
    return m * passes + costs.update(each), memory


def _moves(search: Search, layouts: Sequence[Candidate]) -> Callable[[int], Numbers]:
    """Gives the seconds of a step between a layer and the next one, by both layouts.

    Where more tensor ranks follow, neighbours gather one another's samples, and keep their own of
    the gradients; where fewer do, the other way round.  Others exchange all they have, both times.
    """
    machine, itemsize = search.machine, search.numerics.computed
    size = len(layouts)
    factors = np.zeros((2, size, size))  # of latency, and of bytes
    for (i, a), (j, b) in ((one, two) for one in enumerate(layouts) for two in enumerate(layouts)):
        wide, thin = sorted((a, b), key=lambda own: -own.data)
        if (a.data, a.tensor, a.context, a.sequence) == (b.data, b.tensor, b.context, b.sequence):
            continue
        ranks, stride, times = machine.ranks, 1, 2
        if a.context == b.context and not (a.sequence or b.sequence) and not wide.data % thin.data:
            ranks, stride, times = wide.data // thin.data, wide.tensor, 1
        nbytes = search.batch * itemsize / (thin.data * thin.context)
        fixed = machine.scatter(0.0, ranks, stride) + machine.call
        factors[:, i, j] = (
            times * a.micro_batches * fixed,
            times * (machine.scatter(nbytes, ranks, stride) - machine.scatter(0.0, ranks, stride)),
        )
    return lambda layer: factors[0] + factors[1] * search.layers[layer].outputs


def cheapest(
    seconds: Numbers, moves: Callable[[int], Numbers], memory: Numbers, limit: float
) -> tuple[float, list[int]]:
    """The path of least cost through (layer, layout), whose bytes are at most ``limit``.

    A min-plus product over the layers, whose elements keep every pair of (seconds, bytes) that no
    other one beats in both; without a limit that is one pair.

    Args:
        seconds, memory: costs and bytes, shape (layers, layouts).
        moves: gives the costs between layer ``n`` and the next, shape (layouts, layouts).
        limit: most bytes.

    Returns:
        The cost, and the layout of each layer; infinite and none if no path is within the limit.
    """
    layers, count = seconds.shape
    memory = memory if np.isfinite(limit) else np.zeros_like(memory)
    least = np.append(np.cumsum(memory.min(axis=1)[::-1])[::-1], 0.0)  # of the layers from here on
    times, sizes, at = seconds[0], memory[0], np.arange(count)
    steps: list[tuple[_Indices, _Indices]] = [(at, np.zeros(count, int))]
    for layer in range(1, layers):
        between, found = moves(layer - 1), []
        for layout in range(count):
            own = times + between[at, layout] + seconds[layer, layout]
            more = sizes + memory[layer, layout]
            for label in _unbeaten(own, more, limit - least[layer + 1]):
                found.append((own[label], more[label], layout, label))
        if not found:
            return np.inf, []
        times, sizes, at, before = (np.array(part) for part in zip(*found, strict=True))
        steps.append((at, before))
    allowed = np.where(sizes <= limit, times, np.inf)
    label = int(allowed.argmin())
    if allowed[label] == np.inf:
        return np.inf, []
    total, path = float(allowed[label]), []
    for layouts, before in reversed(steps):
        path.append(int(layouts[label]))
        label = int(before[label])
    return total, path[::-1]


def _unbeaten(seconds: Numbers, memory: Numbers, limit: float) -> _Indices:
    """Indices of the pairs within a limit that no other one beats in both."""
    order = np.lexsort((memory, seconds))
    order = order[memory[order] <= limit]
    smallest = np.minimum.accumulate(memory[order]) if len(order) else memory[order]
    return order[np.append([True], smallest[1:] < smallest[:-1])] if len(order) else order
