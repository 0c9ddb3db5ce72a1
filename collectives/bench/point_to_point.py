"""Messages between pairs of ranks, by OSU's conventions.

The ranks of the first half are paired with those of the second, rank i with rank i + p/2, so that
on several nodes the messages cross the network.
"""

from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

from collectives.bench.measure import Case, Result, allocator
from collectives.communicator import Communicator

#: Messages in flight at a time where bandwidth is measured, as in OSU's tests.
WINDOW = 64
_TAG, _ACKNOWLEDGE = 1, 2
#: Round trips before those that are timed.
_WARM_UP = 20


class Pair:
    """This rank's end of its pair, on buffers that MPI reads and writes directly."""

    def __init__(self, comm: Communicator, nbytes: int, memory: str) -> None:
        half = comm.size // 2
        self.comm = comm
        self.first = comm.rank < half
        self.peer = comm.rank + half if self.first else comm.rank - half
        self.takes_part = comm.rank < 2 * half
        allocate = allocator(comm, memory)
        out, into = allocate(nbytes, np.uint8), allocate(nbytes, np.uint8)
        self.out, self.into = [out, nbytes, MPI.BYTE], [into, nbytes, MPI.BYTE]

    def latency(self) -> None:
        """A round trip."""
        if self.first:
            self.comm.Send(self.out, self.peer, _TAG)
            self.comm.Recv(self.into, self.peer, _TAG)
        else:
            self.comm.Recv(self.into, self.peer, _TAG)
            self.comm.Send(self.out, self.peer, _TAG)

    def bandwidth(self) -> None:
        """A window of messages one way, and an acknowledgement."""
        requests = [
            self.comm.Isend(self.out, self.peer, _TAG)
            if self.first
            else self.comm.Irecv(self.into, self.peer, _TAG)
            for _ in range(WINDOW)
        ]
        MPI.Request.Waitall(requests)
        self._acknowledge()

    def bibandwidth(self) -> None:
        """Windows of messages both ways at once."""
        requests = [self.comm.Irecv(self.into, self.peer, _TAG) for _ in range(WINDOW)]
        requests += [self.comm.Isend(self.out, self.peer, _TAG) for _ in range(WINDOW)]
        MPI.Request.Waitall(requests)
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self.first:
            self.comm.recv(source=self.peer, tag=_ACKNOWLEDGE)
        else:
            self.comm.send(None, self.peer, _ACKNOWLEDGE)


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


def measure_pairs(comm: Communicator, case: Case) -> list[Result]:
    """The result of ``case.collective``.  Collective.

    ``latency`` is half a round trip.  ``bandwidth``, ``bibandwidth`` and ``multipair`` are the time
    of one message of a window; the bandwidth counts the messages of one pair, or with ``multipair``
    of all pairs.
    """
    test = case.collective
    pair = Pair(comm, case.nbytes, case.memory)
    all_pairs = comm.size // 2 if test == "multipair" else 1
    busy = pair.takes_part and (test == "multipair" or comm.rank in (0, comm.size // 2))
    run = {"latency": pair.latency, "bibandwidth": pair.bibandwidth}.get(test, pair.bandwidth)
    messages = 2 if test == "latency" else WINDOW
    directions = 2 if test == "bibandwidth" else 1
    iters = case.iters or max(1, min(1000, (1 << 24) // (messages * max(case.nbytes, 256))))

    def timed(turns: int) -> float:
        comm.Barrier(algorithm="native")
        begun = perf_counter()
        for _ in range(turns if busy else 0):
            run()
        return comm.allreduce((perf_counter() - begun) / turns, MPI.MAX) / messages

    timed(max(1, case.warmup))
    result = Result(
        test, "native", "native", "messages of mpi4py", case.nbytes, case.nbytes, "uint8", "none",
        False, case.memory, comm.size, iters, streams=all_pairs * directions,
    )  # fmt: skip
    result.times_us = [1e6 * timed(iters) for _ in range(case.repeats)]
    return [result]
