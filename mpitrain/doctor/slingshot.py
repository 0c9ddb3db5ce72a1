"""Check of HPE's Slingshot, which an MPI takes by libfabric's cxi alone, and of Cray MPICH."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

from mpitrain.doctor.finding import Finding, fail, gathered, ok, warn
from mpitrain.doctor.placement import visible_gpus

_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"


class Fabric(NamedTuple):
    """Slingshot and MPI on a rank.

    Attributes:
        adapters: Slingshot's adapters, by name.
        cxi, gtl: whether the library of these adapters, and Cray's for GPUs, is in this process.
        cray: whether the MPI is Cray MPICH.
        gpus: number of GPUs that this rank can open.
        variables: environment variables that decide on the transport.
    """

    adapters: tuple[str, ...] = ()
    cxi: bool = False
    cray: bool = False
    gtl: bool = False
    gpus: int = 0
    variables: Mapping[str, str] = {}


def slingshot(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Whether MPI takes Slingshot where there is one, and whether Cray MPICH fits its settings."""

    def local() -> Fabric:
        maps = Path("/proc/self/maps").read_text("utf-8", errors="replace")
        return fabric(Path("/sys/class"), os.environ, MPI.Get_library_version(), maps)

    return gathered(comm, "Slingshot", local, judge_slingshot)


def fabric(classes: Path, environment: Mapping[str, str], library: str, maps: str) -> Fabric:
    """Findings of a rank, from ``/sys/class``, MPI's version and the text of ``/proc/PID/maps``."""
    found = sorted(path.name for path in (classes / "cxi").glob("*"))
    if not found and not list((classes / "infiniband").glob("*")):
        # A container may hide the class; an older Slingshot has InfiniBand's adapters.
        found = sorted(path.name for path in (classes / "net").glob("hsn*"))
    return Fabric(
        tuple(found), "/libcxi" in maps, "CRAY MPICH" in library.upper(), "/libmpi_gtl" in maps,
        visible_gpus(environment),
        {k: environment[k] for k in (_SUPPORT, "OMPI_MCA_pml") if k in environment},
    )  # fmt: skip


def judge_slingshot(found: list[Fabric]) -> Finding:
    for rank, own in enumerate(found):
        if own.adapters and not (own.cxi or own.cray):
            why = "its MPI has not loaded libcxi: messages take TCP"
            if own.variables.get("OMPI_MCA_pml") == "ucx":
                why = "OMPI_MCA_pml=ucx, and UCX knows no Slingshot"
            return fail(
                f"rank {rank} has {' '.join(own.adapters)}, but {why}",
                "build mpi4py with the site's MPI (docs/sites.md), or take an Open MPI whose "
                "libfabric knows cxi with --site slingshot_openmpi; pip's MPIs do not",
            )
        support = own.variables.get(_SUPPORT, "0")
        if own.cray and support == "1" and not own.gtl:
            return fail(
                f"rank {rank}: {_SUPPORT}=1, and Cray MPICH has no GTL library here",
                "build mpi4py again with the module craype-accel-* loaded, or set it to 0, where "
                "messages go through the host",
            )
        if own.cray and own.gpus and support != "1":
            return warn(
                f"rank {rank}: Cray MPICH takes no GPU's memory, as {_SUPPORT} is {support}",
                "nothing where messages go through the host or NCCL; a program that hands arrays "
                "on a GPU to MPI crashes: set it to 1, with an mpi4py built for it",
            )
    first = found[0]
    if not first.adapters:
        return ok("Cray MPICH" if first.cray else "none")
    text = f"{' '.join(first.adapters)}, by {'Cray MPICH' if first.cray else 'libcxi'}"
    return ok(text)
