"""The end of a profiled run: clocks are aligned, and rank 0 writes what all ranks bring."""

import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from mpi4py import MPI

from collectives.run.record import MOST, Records, sample
from collectives.run.report import write
from collectives.run.waits import Ran

#: Round trips to a rank of another machine.
_TRIPS = 8


def ahead(comm: MPI.Intracomm) -> float:
    """Seconds that this rank's clock is ahead of rank 0's; collective.

    The fastest of some round trips bounds the error by half of itself (Cristian 1989).  Ranks of a
    machine have one clock, and its first rank measures for all of them.
    """
    clocks = comm.allgather(Path("/proc/sys/kernel/random/boot_id").read_text())
    best = float("inf"), 0.0
    for rank in sorted({clocks.index(clock) for clock in clocks} - {0}):
        for _ in range(_TRIPS if comm.rank in (0, rank) else 0):
            if comm.rank == 0:
                comm.recv(source=rank)
                comm.send(perf_counter(), rank)
            else:
                there = perf_counter()
                comm.send(None, 0)
                theirs = comm.recv(source=0)
                back = perf_counter()
                best = min(best, (back - there, (there + back) / 2 - theirs))
    return comm.allgather(best[1])[clocks.index(clocks[comm.rank])]


class Profile:
    """A run that is profiled.  The constructor is collective."""

    def __init__(self, records: Records, file: str) -> None:
        self.records, self.file = records, file
        self.comm = MPI.Intracomm(MPI.COMM_WORLD).Dup()
        self.zero = self.comm.bcast(perf_counter())
        self.begun, self.ahead = perf_counter(), ahead(self.comm)

    def finish(self) -> None:
        """Writes the profile; collective."""
        comm, ended, recorders = self.comm, perf_counter(), self.records.every
        drift = (ahead(comm) - self.ahead) / (perf_counter() - self.begun)

        def common(seconds: float) -> float:
            return seconds - self.ahead - drift * (seconds - self.begun) - self.zero

        ran = Ran(ended - self.begun, [], [])
        for recorder in recorders:
            first = len(ran.sites)
            ran.sites.extend(replace(site, took={}) for site in recorder.sites.values())
            ran.kept.extend(
                one._replace(
                    begun=common(one.begun), ended=common(one.ended), site=first + one.site
                )
                for one in recorder.kept
            )
        mask, kept = comm.allreduce(max(one.mask for one in recorders), MPI.MAX), ran.kept
        while comm.allreduce(len(kept := sample(kept, mask))) > 10 * MOST:
            mask = 2 * mask + 1
        ranks = comm.gather(ran._replace(kept=kept))
        if ranks is not None:
            print(write(ranks, self.file, mask.bit_length()), file=sys.stderr, flush=True)
        comm.Free()
