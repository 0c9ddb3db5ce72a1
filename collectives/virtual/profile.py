"""The profile of a program on virtual ranks: as that of ranks of MPI, on the virtual clock."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpi4py import MPI

from collectives.run import calls, report
from collectives.run.record import MOST, Recorder, sample
from collectives.run.waits import Ran
from collectives.virtual.cluster import VirtualCluster
from collectives.virtual.communicator import Comm, Intracomm
from collectives.virtual.rank import here
from collectives.virtual.topologies import Cartcomm, Topocomm


def record(cluster: VirtualCluster) -> None:
    """From now on the ranks' calls are recorded."""
    for rank in cluster.ranks:
        rank.recorder = Recorder()
        rank.recorder.last, rank.recorder.main = {0: 0.0}, 0
    of_each: Any = SimpleNamespace(add=lambda *given: here().recorder.add(*given))
    watch = calls.Watch(of_each)
    Comm.numbers = property(_numbers)  # type: ignore[attr-defined]
    for kind, names in ((Intracomm, calls.NAMES), (Topocomm, calls.TOPOLOGY), (Cartcomm, ["Sub"])):
        watch.record(kind, names)
    MPI.Request, MPI.Prequest = watch.kinds.values()  # type: ignore[misc]


def _numbers(comm: Any) -> calls.Numbers | None:
    """Numbers of the calls of this rank on a communicator."""
    context = comm.held
    if context and comm.rank not in context.called:
        context.called[comm.rank] = calls.Numbers(comm, {context.members: id(context)})
    return context and context.called[comm.rank]


def write(cluster: VirtualCluster, file: Path) -> str:
    """Writes the profile; returns what is printed."""
    found = [rank.recorder for rank in cluster.ranks]
    mask = max(one.mask for one in found)
    while sum(map(len, kept := [sample(one.kept, mask) for one in found])) > 3 * MOST:
        mask = 2 * mask + 1
    ranks = [
        Ran(rank.clock, list(rank.recorder.sites.values()), own)
        for rank, own in zip(cluster.ranks, kept, strict=True)
    ]
    return report.write(ranks, file, mask.bit_length())
