"""Schedules made of other entries of the registry, as their options name them."""

from math import isqrt

from collectives.algorithms import hierarchical
from collectives.algorithms.registry import REGISTRY
from collectives.errors import UnknownAlgorithm
from collectives.schedule import Schedule


def hierarchical_allreduce(
    size: int, local: int = 0, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """``intra`` names a reduce-scatter and an all-gather, ``inter`` an all-reduce."""
    local, nodes = _split("hierarchical", size, local)
    scatter = REGISTRY.schedule("reduce_scatter", intra, local)
    gather = REGISTRY.schedule("allgather", intra, local)
    across = REGISTRY.schedule("allreduce", inter, nodes)
    for part in (across, gather):
        if part.workspace or not part.in_place:
            raise UnknownAlgorithm(f"hierarchical cannot use {part}: it needs memory of its own")
    return hierarchical.allreduce(scatter, across, gather)


def allreduce_by_leaders(
    size: int, local: int = 0, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """``intra`` and ``inter`` name all-reduces."""
    local, nodes = _split("leaders", size, local)
    return hierarchical.by_leaders(
        REGISTRY.schedule("allreduce", intra, local),
        REGISTRY.schedule("allreduce", inter, nodes),
        REGISTRY.schedule("broadcast", "binomial_tree", local),
    )


def _split(name: str, size: int, local: int) -> tuple[int, int]:
    """Ranks of a node and nodes; without ``local``, as square as possible."""
    if local == 0:
        local = next(n for n in range(isqrt(size), 0, -1) if size % n == 0)
    if size % local:
        raise UnknownAlgorithm(f"{name}: {size} ranks are no whole number of nodes of {local}")
    return local, size // local
