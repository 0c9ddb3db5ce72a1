"""Checks of what lies between the ranks: devices, transports, messages."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

from collectives.bench.point_to_point import half_round_trip
from collectives.calls.native import library
from collectives.calls.tables import source, unmeasured
from collectives.execution.transport.cuda_probe import probe
from mpitrain.doctor.finding import Finding, gathered, in_parts, leader, ok, warn

#: Prefixes of the environment variables that choose a transport, of each MPI library.
_CHOICES = (
    "UCX_", "FI_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "PSM2_", "OMPI_MCA_pml", "OMPI_MCA_mtl",
    "OMPI_MCA_btl", "OMPI_MCA_osc", "OMPI_MCA_coll_",
)  # fmt: skip
_VARIABLES_SHOWN = 6
#: Variables that switch XPMEM off, of Cray MPICH and of MPICH.
_XPMEM = ("MPICH_SMP_SINGLE_COPY_MODE", "MPIR_CVAR_CH4_XPMEM_ENABLE")
_LARGE = 4 << 20


class Links(NamedTuple):
    """A node's network.

    Attributes:
        infiniband: devices, ``name (state, rate)``.
        ethernet: interfaces that are up and lead to other machines.
        variables: ``NAME=value`` of each variable that chooses a transport.
        xpmem: whether ranks may read one another's memory by XPMEM.
    """

    infiniband: tuple[str, ...]
    ethernet: tuple[str, ...]
    variables: tuple[str, ...]
    xpmem: bool = False


def gpus(comm: MPI.Intracomm, folder: Path) -> Finding:
    """A transfer of device memory, once a node, in a child process that may crash."""

    def transfer(first: int) -> tuple[bool, str] | None:
        if comm.rank != first or not Path("/dev/nvidiactl").exists():
            return None
        return probe()

    return in_parts(comm, "GPU", [lambda _: leader(comm), transfer], judge_gpus)


def judge_gpus(found: list[tuple[bool, str] | None]) -> Finding:
    measured = [(rank, one) for rank, one in enumerate(found) if one is not None]
    if not measured:
        return ok("no GPU")
    for rank, (works, text) in measured:
        if not works:
            return warn(
                f"MPI does not take device memory, rank {rank}: {text}",
                "messages go through the host; a CUDA-aware MPI with UCX would send them directly",
            )
    return ok("MPI takes device memory")


def network(comm: MPI.Intracomm, folder: Path) -> Finding:
    """InfiniBand devices, interfaces, and the variables that choose transports."""
    return gathered(comm, "network", lambda: links(Path("/sys/class"), os.environ), judge_network)


def links(classes: Path, environment: Mapping[str, str]) -> Links:
    """A node's network, from ``/sys/class`` and the environment."""
    infiniband = []
    for device in sorted((classes / "infiniband").glob("*")):
        states = [_first_line(port / "state") for port in sorted((device / "ports").glob("*"))]
        rates = [_first_line(port / "rate") for port in sorted((device / "ports").glob("*"))]
        infiniband.append(f"{device.name} ({', '.join(states + rates)})")
    ethernet = [
        interface.name
        for interface in sorted((classes / "net").glob("*"))
        if interface.name != "lo" and _first_line(interface / "operstate") in ("up", "unknown")
    ]
    variables = sorted(f"{k}={v}" for k, v in environment.items() if k.startswith(_CHOICES))
    xpmem = (classes / "misc/xpmem").exists()
    return Links(tuple(infiniband), tuple(ethernet), tuple(variables), xpmem)


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return "unknown"


def judge_network(found: list[Links]) -> Finding:
    first = found[0]
    text = "; ".join(first.infiniband) or "no InfiniBand"
    text += f"; interfaces {' '.join(first.ethernet) or 'none'}"
    text += f"; {' '.join(first.variables[:_VARIABLES_SHOWN]) or 'no transport variables set'}"
    if len(first.variables) > _VARIABLES_SHOWN:
        text += f" and {len(first.variables) - _VARIABLES_SHOWN} more"
    if first.xpmem and not any(one.startswith(_XPMEM) for one in first.variables):
        text += f"; XPMEM slows some MPICHs' broadcasts: try {_XPMEM[0]}=CMA or {_XPMEM[1]}=0"
    for rank, other in enumerate(found):
        if other.variables != first.variables:
            differing = sorted({*other.variables} ^ {*first.variables})
            return warn(
                f"ranks 0 and {rank} have different transport variables: {' '.join(differing)}",
                "set them in the job script, which passes them to all (srun --export=ALL, "
                "mpirun -x NAME)",
            )
        if len(other.infiniband) != len(first.infiniband):
            return warn(
                f"rank 0 has {len(first.infiniband)} InfiniBand devices, rank {rank} has "
                f"{len(other.infiniband)}",
                "ask for nodes of one kind (--constraint)",
            )
        down = [device for device in other.infiniband if "ACTIVE" not in device]
        if down:
            return warn(
                f"rank {rank}: {down[0]} is not active",
                "choose an active one (UCX_NET_DEVICES), or tell your administrators",
            )
    return ok(text)


def tuning(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Whether the tuning table has a rule for large all-reduces of ranks on so many nodes."""
    return gathered(comm, "tuning", MPI.Get_processor_name, judge_tuning)


def judge_tuning(found: list[str]) -> Finding:
    per_node = max(Counter(found).values())
    command = unmeasured(library(), len(found), per_node)
    if not command:
        return ok(f"auto goes by {source()}")
    return warn(
        f"auto calls the MPI library: {source()} has no rule for {len(found)} ranks of "
        "several nodes",
        f"{command} measures it, for all later runs",
    )


def messages(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Latency and bandwidth from rank 0 to the last one."""

    def local() -> tuple[float, float]:
        return half_round_trip(comm, 1, turns=200), half_round_trip(comm, _LARGE, turns=8)

    return gathered(comm, "messages", local, judge_messages)


def judge_messages(found: list[tuple[float, float]]) -> Finding:
    """Judge the measurement of rank 0, which fails far below the speed of a gigabit link."""
    if len(found) == 1:
        return ok("a single rank sends none")
    latency, per_large = found[0]
    bandwidth = _LARGE / per_large
    text = f"rank 0 to {len(found) - 1}: {1e6 * latency:.1f} us, {bandwidth / 1e9:.2f} GB/s"
    if latency > 1e-3 or bandwidth < 0.1e9:
        return warn(
            text,
            "too slow for a cluster's network: see 'cores' for ranks that share a core, and "
            "'network' for the interface (UCX_NET_DEVICES, OMPI_MCA_btl_tcp_if_include)",
        )
    return ok(text)
