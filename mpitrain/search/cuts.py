"""The fastest cut of a chain of layers into stages (Alpa's outer loop, Zheng et al. 2022).

A pipeline of stages that take t_i seconds a micro-batch ends a step of m micro-batches after

    sum t_i + (m - 1) max t_i

For a bound on max t_i, the least sum is a shortest path, found stage by stage from the last one,
so that the stages behind, which say how many micro-batches are in flight, are known:

    F(s, i, w) = min over j > i, r of t(i..j, r) + F(s - 1, j, w - r),    t(i..j, r) <= bound

The bounds are the stages' own times, tried in ascending order until no larger one can win.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Fits = npt.NDArray[np.bool_]


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
    fits: Callable[[int, int], Fits],
    stages: int,
    workers: int,
    micro_batches: float,
    worst: float = np.inf,
) -> Cut | None:
    """The fastest cut into at most ``stages`` stages that use all ``workers``; None: none fits.

    Cost: O(bounds stages workers replicas layers^2).

    Args:
        seconds: for each number of replicas that a stage may have, ``[i, j]`` is the time of a
            micro-batch on the stage of layers ``i <= layer < j``; infinite where there is none.
        fits: for a number of replicas and of stages from this one on, which stages fit in memory.
        stages: most stages.
        workers: number of workers, of all stages' replicas together.
        micro_batches: micro-batches of a step; a large number asks for the least max t_i.
        worst: a cut that takes longer is not looked for.
    """
    allowed = {
        (replicas, behind): np.where(fits(replicas, behind), times, np.inf)
        for replicas, times in seconds.items()
        for behind in range(1, stages + 1)
    }
    least = _shortest(allowed, stages, workers, np.inf)
    if least is None or least[0] * (1 + (micro_batches - 1) / stages) >= worst:
        return None
    every = np.concatenate([times.ravel() for times in allowed.values()])
    # Sums of the same layers differ in their last bits; bounds that close are one.
    bounds = np.unique(every[np.isfinite(every)])
    bounds = bounds[np.append(np.diff(bounds) > 1e-12 * bounds[1:], True)]
    best: Cut | None = None
    low, high = 0, len(bounds) - 1
    while low < high:  # the first bound that has a path at all
        middle = (low + high) // 2
        if _shortest(allowed, stages, workers, bounds[middle]) is None:
            low = middle + 1
        else:
            high = middle
    for bound in bounds[low:]:
        limit = best.seconds if best else worst
        if least[0] + (micro_batches - 1) * bound >= limit:
            break
        found = _shortest(allowed, stages, workers, bound)
        if found is None:
            continue
        total, path = found
        slowest = max(seconds[replicas][first, stop] for first, stop, replicas in path)
        step = float(total + (micro_batches - 1) * slowest)
        if step < limit:
            sizes = tuple(stop - first for first, stop, _ in path)
            best = Cut(step, sizes, tuple(replicas for *_, replicas in path))
    return best


def _shortest(
    allowed: Mapping[tuple[int, int], Seconds], stages: int, workers: int, bound: float
) -> tuple[float, list[tuple[int, int, int]]] | None:
    """The least sum of stages that take at most ``bound``, and its (first, stop, replicas)."""
    layers = len(next(iter(allowed.values()))) - 1
    end = np.full(layers + 1, np.inf)
    end[layers] = 0.0
    # For stages from here to the end and workers that they use: the least sum from each layer on,
    # and the stage that begins there.
    table: dict[tuple[int, int], tuple[Seconds, Seconds, npt.NDArray[np.int64]]] = {}
    sums = {0: end}
    for behind in range(1, stages + 1):
        longer: dict[int, Seconds] = {}
        for used, rest in sums.items():
            for replicas in {replicas for replicas, _ in allowed}:
                if used + replicas > workers:
                    continue
                times = allowed[replicas, behind]
                ways = np.where(times <= bound * (1 + 1e-12), times, np.inf) + rest
                stop = ways.argmin(axis=1)
                found = ways[np.arange(layers + 1), stop]
                key = behind, used + replicas
                if key not in table:
                    table[key] = found, np.full(layers + 1, replicas), stop
                else:
                    old, whose, old_stop = table[key]
                    better = found < old
                    table[key] = (
                        np.where(better, found, old),
                        np.where(better, replicas, whose),
                        np.where(better, stop, old_stop),
                    )
                longer[used + replicas] = table[key][0]
        sums = longer
    ends = [(table[key][0][0], key) for key in table if key[1] == workers]
    total, (behind, used) = min(ends, default=(np.inf, (0, 0)))
    if not np.isfinite(total):
        return None
    path, first = [], 0
    while first < layers:
        _, whose, stops = table[behind, used]
        replicas, stop = int(whose[first]), int(stops[first])
        path.append((first, stop, replicas))
        first, behind, used = stop, behind - 1, used - replicas
    return float(total), path
