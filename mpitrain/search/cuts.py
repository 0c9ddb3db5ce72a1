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

    Cost: O(bounds workers replicas layers^2); with ``worst``, only of numbers of workers behind a
    stage with which a better cut may be made.

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
    below = worst - later * bounds[0] if len(bounds) else 0.0
    least = len(bounds) and _shortest(seconds, fitting, workers, bounds[-1], below)
    if not least:
        return best if np.isfinite(worst) else None
    low, high = 0, len(bounds) - 1
    while low < high:  # the first bound that has a path at all
        middle = (low + high) // 2
        if _shortest(seconds, fitting, workers, bounds[middle], below) is None:
            low = middle + 1
        else:
            high = middle
    for bound in bounds[low:]:
        limit = min(best.seconds, worst)
        if least[0] + later * bound >= limit:
            break
        found = _shortest(seconds, fitting, workers, bound, limit - later * bound)
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
    below: float,
) -> tuple[float, list[tuple[int, int, int]]] | None:
    """The least sum of stages that take at most ``bound``, and its (first, stop, replicas), if it
    is less than ``below``."""
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
    # Few sums are possible of equal stages, and soon found.
    is_relaxed = len(seconds) > 1 and np.isfinite(below)
    relaxed = _before(seconds, bound, workers) if is_relaxed else None
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
            least = np.minimum.reduce([found for *_, found in ways])
            if relaxed is not None:
                prices, before = relaxed
                others = (before - (workers - used) * prices[:, None]).max(axis=0)
                least[least + others >= below * (1 + 1e-9)] = np.inf
            if np.isfinite(least).any():
                stages[used], sums[used] = ways, least
    if workers not in sums or not sums[workers][0] < below:
        return None
    path, start, used = [], 0, workers
    while start < layers:
        replicas, ends, _ = min(stages[used], key=lambda way: way[2][start])
        path.append((start, int(ends[start]), replicas))
        start, used = path[-1][1], used - replicas
    return float(sums[workers][0]), path


def _before(
    seconds: Mapping[int, Seconds], bound: float, workers: int
) -> tuple[npt.NDArray[np.float64], Seconds]:
    """Prices of a worker, and for each the least sum of stages before each layer if it is paid.

    Less what the workers cost that there are, no sum of stages that use them all is smaller
    (Lagrange's relaxation).
    """
    replicas, every = np.array([*seconds])[:, None, None], np.array([*seconds.values()])
    every = np.where(every <= bound, every, np.inf)
    middle = _least_sum(every.min(axis=0)) / workers
    prices, found = np.zeros(0), np.zeros((0, every.shape[1]))
    for powers in (np.arange(-12.0, 13.0), np.arange(-0.9, 1.0, 0.1)):
        for price in middle * 2.0**powers:
            paid, sums = (every + price * replicas).min(axis=0), np.zeros(every.shape[1])
            for stop in range(1, len(sums)):
                sums[stop] = (sums[:stop] + paid[:stop, stop]).min()
            prices, found = np.append(prices, price), np.vstack([found, sums])
        middle = prices[(found[:, -1] - workers * prices).argmax()]  # the tightest one
    return prices, found
