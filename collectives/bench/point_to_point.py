"""The time of a message between two ranks."""

from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

#: Round trips before those that are timed.
_WARM_UP = 20


def half_round_trip(comm: MPI.Intracomm, nbytes: int, turns: int) -> float:
    """Median seconds of a message between rank 0 and the last one, as each of them sees it.

    Collective.  A lone rank sends none.
    """
    last, items, times = comm.size - 1, np.zeros(nbytes, np.uint8), []
    for _ in range(_WARM_UP + turns):
        begun = perf_counter()
        if comm.rank == 0 and last:
            comm.Send([items, MPI.BYTE], last)
            comm.Recv([items, MPI.BYTE], last)
        elif comm.rank == last and last:
            comm.Recv([items, MPI.BYTE], 0)
            comm.Send([items, MPI.BYTE], 0)
        times.append(perf_counter() - begun)
    return median(times[_WARM_UP:]) / 2
