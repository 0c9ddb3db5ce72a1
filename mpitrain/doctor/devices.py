"""The GPU on which each rank would compute."""

from collections import Counter
from pathlib import Path

from mpi4py import MPI

from collectives.errors import INSTALL_CUPY
from mpitrain.device.choice import RankGPUs, lacking, local_rank, look
from mpitrain.doctor.finding import Finding, in_parts, ok, warn


def devices(comm: MPI.Intracomm, folder: Path) -> Finding:
    """The GPU that ``run.device = "cuda"`` would take; loads CuPy only if there is a GPU."""

    def found(local: int) -> RankGPUs:
        if not Path("/dev/nvidiactl").exists():
            return RankGPUs("no GPU")
        return look(local)

    return in_parts(comm, "device", [lambda _: local_rank(comm), found], judge_devices)


def judge_devices(found: list[RankGPUs]) -> Finding:
    if all(one.why == "no GPU" for one in found):
        return ok("cpu; no rank has a GPU")
    if why := lacking(found):
        return warn(
            f"run.device = 'auto' is cpu: {why}",
            f"start every rank where it sees a GPU and has CuPy: {INSTALL_CUPY}",
        )
    count = Counter(one.identity for one in found)
    if len(count) < len(found):
        return warn(
            f"{len(found)} ranks share {len(count)} GPUs",
            "start as many ranks on a node as it has GPUs, each of which all of them see",
        )
    return ok("a GPU of its own for each rank")
