"""A profiled run: clocks are aligned, and rank 0 writes at the end what all ranks bring."""

import sys
from pathlib import Path
from time import perf_counter

from mpi4py import MPI

from collectives.clocks import ahead
from collectives.run.record import MOST, Recorder, sample
from collectives.run.report import write
from collectives.run.waits import Ran


class Profile:
    """A run that is profiled.  The constructor is collective."""

    def __init__(self, recorder: Recorder, file: str) -> None:
        self.recorder, self.file = recorder, Path(file).absolute()
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
