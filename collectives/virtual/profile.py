"""The profile of a program on virtual ranks: as that of ranks of MPI, on the virtual clock."""

from pathlib import Path
from typing import Any

from collectives.run import calls, report
from collectives.run.record import MOST, Recorder, Site, sample
from collectives.run.waits import Ran
from collectives.virtual.cluster import VirtualCluster
from collectives.virtual.communicator import Comm, Intracomm
from collectives.virtual.rank import here
from collectives.virtual.requests import Prequest, VirtualRequest
from collectives.virtual.topologies import Cartcomm, Topocomm


class _Recorders(Recorder):
    """The recorder of the rank that calls."""

    def add(self, *given: Any) -> Site:
        site: Site = here().recorder.add(*given)
        return site


def record(cluster: VirtualCluster) -> None:
    """From now on the ranks' calls are recorded."""
    for rank in cluster.ranks:
        rank.recorder = Recorder(last=0.0)
    watch = calls.Watch(_Recorders())
    Comm.numbers = property(_numbers)  # type: ignore[attr-defined]
    for comms, names in (
        (Intracomm, calls.NAMES),
        (Topocomm, calls.TOPOLOGY),
        (Cartcomm, ["Sub"]),
    ):
        watch.record(comms, names)
    for kind in (VirtualRequest, Prequest):
        watch.kinds[kind] = lambda request: request
        watch.record_ends(kind)


def _numbers(comm: Comm) -> calls.Numbers | None:
    """Numbers of the calls of this rank on a communicator."""
    if not comm:
        return None
    context, own = comm.handle, comm.rank
    return context.called.setdefault(own, calls.Numbers(id(context), own))


def write(cluster: VirtualCluster, file: Path) -> str:
    """Writes the profile; returns what is printed."""
    recorders = [rank.recorder for rank in cluster.ranks]
    mask = max(one.mask for one in recorders)
    while sum(map(len, kept := [sample(one.kept, mask) for one in recorders])) > 3 * MOST:
        mask = 2 * mask + 1
    ranks = [
        Ran(rank.clock, list(rank.recorder.sites.values()), own)
        for rank, own in zip(cluster.ranks, kept, strict=True)
    ]
    return report.write(ranks, file, mask.bit_length())
