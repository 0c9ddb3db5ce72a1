"""Share of a nonblocking collective that computation hides, as OSU counts it."""

from time import perf_counter

import numpy as np
from mpi4py import MPI

from collectives.bench.device import Row
from collectives.communicator import Communicator

_TURNS = 20


class Work:
    """Computation of a given length, in pieces."""

    def __init__(self) -> None:
        self._items = np.ones(512)
        begun = perf_counter()
        self.run(2000)
        self.seconds = (perf_counter() - begun) / 2000

    def run(self, pieces: int) -> None:
        """Computes ``pieces`` times ``seconds``."""
        for _ in range(pieces):
            np.multiply(self._items, 1.0, out=self._items)


def overlap(comm: Communicator, plan: Row, tests: int) -> float:
    """Percentage of the collective's time that equally long computation hides.

    100 (1 - (total - computation) / pure), where total is Start, the computation with ``tests``
    calls of ``Test``, and Wait; at least 0.  Medians of the slowest rank.  Collective.
    """

    def median(of: list[float]) -> float:
        return float(np.median([comm.allreduce(seconds, MPI.MAX) for seconds in of]))

    work = Work()
    pure = median([_run(comm, plan, work, 0, 0) for _ in range(_TURNS)])
    pieces = max(1, round(pure / work.seconds / (tests + 1)))
    computation = median([_run(comm, None, work, pieces, tests) for _ in range(_TURNS)])
    total = median([_run(comm, plan, work, pieces, tests) for _ in range(_TURNS)])
    return max(0.0, 100 * (1 - (total - computation) / pure))


def _run(comm: Communicator, plan: Row | None, work: Work, pieces: int, tests: int) -> float:
    comm.Barrier(algorithm="native")
    begun = perf_counter()
    if plan is not None:
        plan.Start()
    for _ in range(tests):
        work.run(pieces)
        if plan is not None:
            plan.Test()
    work.run(pieces)
    if plan is not None:
        plan.Wait()
    return perf_counter() - begun
