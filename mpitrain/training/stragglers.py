"""Finds stragglers: ranks that compute longer than their peers, so that the others wait."""

import resource
import socket
from collections.abc import Hashable, Mapping, Sequence
from statistics import median

from mpi4py import MPI

from mpitrain.metrics import RankTime, Straggler, Times

#: A rank is a straggler if it takes this many times its peers' median, and is this many seconds
#: slower.
_FACTOR = 1.5
_SECONDS = 0.05


class Busy:
    """Time of this rank by activity, and its computing time since the last search for a straggler.

    Attributes:
        computing, reducing, meeting: seconds since the start, as in :class:`RankTime`.
        waiting: seconds since the start, by the rank that was waited for.
        met, published: seconds at the end of the last step that count in the next step.
    """

    def __init__(self) -> None:
        self._seconds = self.computing = self.reducing = self.meeting = 0.0
        self.met = self.published = 0.0
        self.waiting: dict[int, float] = {}

    def begin(self) -> None:
        """Take time anew from now; only the seconds ``published`` still count in the next step."""
        self.met = 0.0

    def settle(self) -> float:
        """Count the seconds ``published`` now, as no step follows; returns them."""
        seconds, self.published = self.published, 0.0
        self.reducing += seconds
        return seconds

    def add(self, seconds: float, reducing: float, waiting: Mapping[int, float]) -> None:
        """Add a step of ``seconds``.

        Args:
            seconds: seconds of the whole step.
            reducing: seconds of it in the sum of gradients.
            waiting: seconds of it spent waiting, by the rank that was waited for.
        """
        reducing += self.published
        for rank, part in waiting.items():
            self.waiting[rank] = self.waiting.get(rank, 0.0) + part
        own = seconds - reducing - sum(waiting.values()) - self.met
        self.meeting += self.met
        self.reducing += reducing
        self.computing += own
        self._seconds += own

    def times(self, comm: MPI.Intracomm, stage: int, tensor: int) -> Times:
        """Time of all ranks so far, by activity; collective."""
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        own = RankTime(
            stage, tensor, self.computing, self.reducing, self.waiting, self.meeting, memory
        )
        return Times(comm.allgather(own))

    def slowest(self, comm: MPI.Intracomm, peers: Hashable, step: int) -> Straggler | None:
        """The rank that kept the others waiting since the last call, or None; a small all-gather.

        Args:
            comm: all ranks.
            peers: ranks with equal values have the same amount of work.
            step: number of the last step.
        """
        told = comm.allgather((self._seconds, peers, socket.gethostname()))
        self._seconds = 0.0
        found = slowest([seconds for seconds, _, _ in told], [group for _, group, _ in told])
        if found is None:
            return None
        rank, factor = found
        return Straggler(step, rank, told[rank][2], factor)


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
