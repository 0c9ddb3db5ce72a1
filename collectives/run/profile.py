"""A profiled run: clocks are aligned, and rank 0 writes at the end what all ranks bring."""

import sys
from pathlib import Path
from time import perf_counter

from mpi4py import MPI

from collectives.run.record import MOST, Recorder, sample
from collectives.run.report import write
from collectives.run.waits import Ran


def ahead(comm: MPI.Intracomm) -> float:
    """Seconds that this rank's clock is ahead of rank 0's; collective.

    The fastest of eight round trips bounds the error by half of itself (Cristian 1989).  Ranks of a
    machine have one clock, and its first rank measures for all of them.
    """
    clocks = comm.allgather(Path("/proc/sys/kernel/random/boot_id").read_text())
    best = float("inf"), 0.0
    for rank in sorted({clocks.index(clock) for clock in clocks} - {0}):
        for _ in range(8 if comm.rank in (0, rank) else 0):
            if comm.rank == 0:
                comm.recv(source=rank)
                comm.send(perf_counter(), rank)
            else:
                there = perf_counter()
                theirs = comm.sendrecv(None, 0, source=0)
                back = perf_counter()
                best = min(best, (back - there, (there + back) / 2 - theirs))
    return comm.allgather(best[1])[clocks.index(clocks[comm.rank])]


class Profile:
    """A run that is profiled.  The constructor is collective."""

    def __init__(self, recorder: Recorder, file: Path) -> None:
        self.recorder, self.file = recorder, file
        self.comm = MPI.Intracomm(MPI.COMM_WORLD).Dup()
        self.zero = self.comm.bcast(perf_counter())
        self.begun, self.ahead = perf_counter(), ahead(self.comm)

    def finish(self) -> None:
        """Writes the profile; collective."""
        comm, recorder, ended = self.comm, self.recorder, perf_counter()
        drift = (ahead(comm) - self.ahead) / (perf_counter() - self.begun)
        kept, mask = recorder.kept, comm.allreduce(recorder.mask, MPI.MAX)
        while comm.allreduce(len(kept := sample(kept, mask))) > 3 * MOST:
            mask = 2 * mask + 1
        for place, one in enumerate(kept):
            shift = self.zero + self.ahead + drift * (one.begun - self.begun)
            kept[place] = one._replace(begun=one.begun - shift, ended=one.ended - shift)
        ranks = comm.gather(Ran(ended - self.begun, list(recorder.sites.values()), kept))
        if ranks is not None:
            print(write(ranks, self.file, mask.bit_length()), file=sys.stderr, flush=True)
        comm.Free()
