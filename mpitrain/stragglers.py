"""Ranks that keep the others waiting: found by what they do while the others wait."""

import socket
from collections.abc import Hashable, Sequence
from statistics import median

from mpi4py import MPI

from mpitrain.metrics import Straggler

#: A rank is a straggler if it takes this many times its peers' median, and is this many seconds
#: slower.
_FACTOR = 1.5
_SECONDS = 0.05


class Busy:
    """Seconds in which this rank did not wait for others, between two looks at them."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """A step took so long, communication and waits left out."""
        self._seconds += seconds

    def slowest(self, comm: MPI.Intracomm, peers: Hashable, step: int) -> Straggler | None:
        """Who kept the others waiting since the last time; collective, a small all-gather.

        Args:
            comm: all ranks.
            peers: ranks with equal values have the same amount of work.
            step: that was done last.
        """
        told = comm.allgather((self._seconds, peers, socket.gethostname()))
        self._seconds = 0.0
        found = slowest([seconds for seconds, _, _ in told], [group for _, group, _ in told])
        if found is None:
            return None
        rank, factor = found
        return Straggler(step, rank, told[rank][2], factor)


def slowest(seconds: Sequence[float], peers: Sequence[Hashable]) -> tuple[int, float] | None:
    """The rank that is furthest above the median of the others in its group, and how many times."""
    scores = []
    for rank, own in enumerate(seconds):
        others = [s for r, s in enumerate(seconds) if r != rank and peers[r] == peers[rank]]
        if others and own - median(others) > _SECONDS and own > _FACTOR * median(others):
            scores.append((own / max(median(others), 1e-9), rank))
    if not scores:
        return None
    factor, rank = max(scores)
    return rank, factor
