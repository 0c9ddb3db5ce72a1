"""The fastest cut of a chain of layers into stages (Alpa's outer loop, Zheng et al. 2022).

A pipeline of stages that take t_i seconds a micro-batch ends a step of m micro-batches after

    sum t_i + (m - 1) max t_i

For a bound on max t_i, the least sum is a shortest path, found stage by stage from the last one,
so that the workers w behind, which say how many micro-batches are in flight, are known:

    F(i, w) = min over j > i, r of t(i..j, r) + F(j, w - r),    t(i..j, r) <= bound

The bounds are the stages' own times, tried in ascending order until no larger one can win.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """Stages in order.

    Attributes:
        seconds: time of a step.
        sizes: number of layers of each stage.
        replicas: replicas of each stage.
    """

    seconds: float
    sizes: tuple[int, ...]
    replicas: tuple[int, ...]


def fastest_cut(
    seconds: Mapping[int, Seconds],
    fitting: Callable[[int, int], Seconds],
    workers: int,
    micro_batches: float,
    worst: float = np.inf,
) -> Cut | None:
    """The fastest cut into stages that use all ``workers``; None: none fits.

    Cost: O(bounds workers replicas layers^2).

    Args:
        seconds: for each number of replicas that a stage may have, ``[i, j]`` is the time of a
            micro-batch on the stage of layers ``i <= layer < j``; infinite where there is none.
        fitting: times for a number of replicas, and of workers from this stage on;
            infinite where the stage does not fit in memory, too.
        workers: number of workers, of all stages' replicas together.
        micro_batches: micro-batches of a step; a large number asks for the least max t_i.
        worst: a cut that takes as long or longer is not looked for; its time is infinite.
    """
    best, later = Cut(np.inf, (), ()), micro_batches - 1
    every = np.array([*seconds.values()])
    # Sums of the same layers differ in their last bits; bounds that close are one.
    bounds = np.unique(every[np.isfinite(every)])
    bounds = bounds[np.append(np.diff(bounds) > 1e-12 * bounds[1:], True)]
    if np.isfinite(worst) and later > 0:
        # No stage of a better cut takes longer than what the least sum of all cuts leaves.
        bounds = bounds[later * bounds <= worst - _least_sum(every.min(axis=0))]

    def is_too_fast(bound: float) -> bool:
        """Whether stages so fast need more workers than there are."""
        needed = np.full_like(every[0], np.inf)
        for replicas, own in sorted(seconds.items(), reverse=True):
            needed[own <= bound * (1 + 1e-12)] = replicas
        return _least_sum(needed) > workers

    bounds = bounds[bisect_left(bounds, True, key=lambda bound: not is_too_fast(bound)) :]
    least = _shortest(seconds, fitting, workers, bounds[-1]) if len(bounds) else None
    if least is None:
        return best if np.isfinite(worst) else None
    low, high = 0, len(bounds) - 1
    while low < high:  # the first bound that has a path at all
        middle = (low + high) // 2
        if _shortest(seconds, fitting, workers, bounds[middle]) is None:
            low = middle + 1
        else:
            high = middle
    for bound in bounds[low:]:
        limit = min(best.seconds, worst)
        if least[0] + later * bound >= limit:
            break
        found = _shortest(seconds, fitting, workers, bound)
        if found is None:
            continue
        total, path = found
        slowest = max(seconds[replicas][first, stop] for first, stop, replicas in path)
        step = float(total + later * slowest)
        if step < limit:
            sizes = tuple(stop - first for first, stop, _ in path)
            best = Cut(step, sizes, tuple(replicas for *_, replicas in path))
    return best


def _least_sum(values: Seconds) -> float:
    """The least sum of ``values[i, j]`` over all cuts into stages."""
    sums = np.zeros(len(values))
    for first in range(len(sums) - 2, -1, -1):
        sums[first] = (values[first, first + 1 :] + sums[first + 1 :]).min()
    return float(sums[0])


def _shortest(
    seconds: Mapping[int, Seconds],
    fitting: Callable[[int, int], Seconds],
    workers: int,
    bound: float,
) -> tuple[float, list[tuple[int, int, int]]] | None:
    """The least sum of stages that take at most ``bound``, and its (first, stop, replicas)."""
    layers = len(next(iter(seconds.values()))) - 1
    rows = np.arange(layers + 1)
    bound *= 1 + 1e-12
    # For each number of replicas, where the stages end that may be fast enough.
    stops = {}
    for replicas, own in sorted(seconds.items()):
        first, stop = np.nonzero(own <= bound)
        if len(first):
            sizes = np.arange(1, (stop - first).max() + 1)
            stops[replicas] = np.minimum(rows[:, None] + sizes, layers)
    # For the workers from a stage on: the least sum from each layer on, and the stage there.
    sums = {0: np.where(rows < layers, np.inf, 0.0)}
    stages: dict[int, list[tuple[int, npt.NDArray[np.int64], Seconds]]] = {}
    for used in range(1, workers + 1):
        ways = []
        for replicas, stop in stops.items():
            if used - replicas in sums:
                own = fitting(replicas, used)[rows[:, None], stop]
                own = np.where(own <= bound, own, np.inf) + sums[used - replicas][stop]
                best = own.argmin(axis=1)
                ways.append((replicas, stop[rows, best], own[rows, best]))
        if ways:
            stages[used] = ways
            sums[used] = np.minimum.reduce([found for *_, found in ways])
    if workers not in sums or not np.isfinite(sums[workers][0]):
        return None
    path, start, used = [], 0, workers
    while start < layers:
        replicas, ends, _ = min(stages[used], key=lambda way: way[2][start])
        path.append((start, int(ends[start]), replicas))
        start, used = path[-1][1], used - replicas
    return float(sums[workers][0]), path
