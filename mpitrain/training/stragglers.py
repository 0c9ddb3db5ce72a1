"""Finds stragglers: ranks that compute longer than their peers, so that the others wait."""

from collections.abc import Hashable, Sequence
from statistics import median

#: A rank is a straggler if it takes this many times its peers' median, and is this many seconds
#: slower.
_FACTOR = 1.5
_SECONDS = 0.05


def slowest(seconds: Sequence[float], peers: Sequence[Hashable]) -> tuple[int, float] | None:
    """The rank furthest above the median of its peers, and its multiple of that median; or None."""
    scores = []
    for rank, own in enumerate(seconds):
        others = [s for r, s in enumerate(seconds) if r != rank and peers[r] == peers[rank]]
        if others and own - median(others) > _SECONDS and own > _FACTOR * median(others):
            scores.append((own / max(median(others), 1e-9), rank))
    if not scores:
        return None
    factor, rank = max(scores)
    return rank, factor
