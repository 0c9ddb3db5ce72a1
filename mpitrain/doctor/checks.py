"""The checks, in the order in which a beginner needs them."""

import os
import platform
import shutil
import socket
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, sleep, time
from typing import Any
from uuid import uuid4

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

from collectives import Communicator, LaunchError
from collectives.cuda_probe import probe
from collectives.launch import check_launch
from mpitrain.doctor.finding import Check, Finding, Status, gathered

_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def packages(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Versions, the same on all ranks."""

    def local() -> str:
        names = ["mpi4py", "numpy"]
        for extra in ("cupy-cuda12x", "cupy-cuda13x", "torch"):
            try:
                version(extra)
                names.append(extra)
            except PackageNotFoundError:
                pass
        found = ", ".join(f"{name} {version(name)}" for name in names)
        return f"Python {platform.python_version()}, {found}"

    def judge(found: list[str]) -> Finding:
        if len(set(found)) > 1:
            return Finding(
                "packages", Status.FAIL, f"differ: {'; '.join(sorted(set(found)))}",
                "start all ranks from one environment, on a file system that all nodes see",
            )  # fmt: skip
        return Finding("packages", Status.OK, found[0])

    return gathered(comm, "packages", local, judge)


def library(comm: MPI.Intracomm, folder: Path) -> Finding:
    """MPI's vendor, version and thread level."""

    def local() -> str:
        vendor, numbers = MPI.get_vendor()
        level = _LEVELS[MPI.Query_thread()]
        standard = ".".join(map(str, MPI.Get_version()))
        return f"{vendor} {'.'.join(map(str, numbers))}, MPI {standard}, threads {level}"

    def judge(found: list[str]) -> Finding:
        if len(set(found)) > 1:
            return Finding("MPI", Status.FAIL, f"differ: {sorted(set(found))}", "use one MPI")
        return Finding("MPI", Status.OK, found[0])

    return gathered(comm, "MPI", local, judge)


def launcher(comm: MPI.Intracomm, folder: Path) -> Finding:
    """The launcher started as many ranks as the library sees."""

    def local() -> str:
        try:
            check_launch(comm.size)
        except LaunchError as error:
            return str(error)
        return ""

    def judge(found: list[str]) -> Finding:
        wrong = [text for text in found if text]
        if wrong:
            return Finding(
                "launcher", Status.FAIL, wrong[0],
                "use the mpirun of the MPI that mpi4py loads, or srun --mpi=pmix (Open MPI) or "
                "--mpi=pmi2 (MPICH)",
            )  # fmt: skip
        return Finding("launcher", Status.OK, f"{comm.size} ranks, as started")

    return gathered(comm, "launcher", local, judge)


def ranks(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Which node has which ranks."""

    def judge(found: list[str]) -> Finding:
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(found):
            nodes.setdefault(host, []).append(rank)
        text = "; ".join(f"{host}: {_runs(own)}" for host, own in nodes.items())
        if len({len(own) for own in nodes.values()}) > 1:
            return Finding(
                "ranks", Status.WARN, text,
                "nodes have different numbers of ranks; hierarchical algorithms want them equal",
            )  # fmt: skip
        return Finding("ranks", Status.OK, text)

    return gathered(comm, "ranks", socket.gethostname, judge)


def cores(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Cores of each rank against the threads of its BLAS."""

    def local() -> tuple[str, frozenset[int], int]:
        threads = max((int(pool["num_threads"]) for pool in threadpool_info()), default=1)
        return socket.gethostname(), frozenset(os.sched_getaffinity(0)), threads

    def judge(found: list[tuple[str, frozenset[int], int]]) -> Finding:
        for host, own in Counter(host for host, _, _ in found).items():
            here: set[int] = set()
            for name, affinity, _ in found:
                here |= affinity if name == host else set()
            if own > len(here):
                return Finding(
                    "cores", Status.WARN, f"{own} ranks on the {len(here)} cores of {host}",
                    "start no more ranks than cores; polling ranks take turns otherwise",
                )  # fmt: skip
            threads = max(count for name, _, count in found if name == host)
            if own * threads > len(here):
                return Finding(
                    "cores", Status.WARN,
                    f"{own} ranks of {threads} BLAS threads on the {len(here)} cores of {host}",
                    "bind ranks to cores or set OMP_NUM_THREADS; the trainer limits its own",
                )  # fmt: skip
        fewest = min(len(affinity) for _, affinity, _ in found)
        return Finding("cores", Status.OK, f"at least {fewest} for each rank")

    return gathered(comm, "cores", local, judge)


def shared_memory(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Ranks of a node see one another's stores."""

    def local() -> tuple[bool, int]:
        with Communicator(comm) as own:
            array = own.empty(own.size, np.int64)
            array[:] = own.rank
            own.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
            right = bool((array == own.size * (own.size - 1) // 2).all())
        return right, shutil.disk_usage("/dev/shm").free

    def judge(found: list[tuple[bool, int]]) -> Finding:
        if not all(right for right, _ in found):
            return Finding("shared", Status.FAIL, "a sum in shared memory is wrong", "report it")
        free = min(free for _, free in found)
        if free < 64 * 2**20:
            return Finding(
                "shared", Status.WARN, f"/dev/shm has {free >> 20} MiB free",
                "MPI libraries need some: start the container with a larger --shm-size",
            )  # fmt: skip
        return Finding("shared", Status.OK, f"memory of a node; /dev/shm has {free >> 20} MiB free")

    return gathered(comm, "shared", local, judge)


def gpus(comm: MPI.Intracomm, folder: Path) -> Finding:
    """A transfer of device memory, in a child process that may crash."""

    def local() -> tuple[bool, str]:
        if not Path("/dev/nvidiactl").exists():
            return True, "no GPU"
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        first = node.rank == 0
        node.Free()
        return probe() if first else (True, "")

    def judge(found: list[tuple[bool, str]]) -> Finding:
        told = [text for _, text in found if text]
        if all(works for works, _ in found):
            return Finding("GPU", Status.OK, told[0] if told else "MPI takes device memory")
        return Finding(
            "GPU", Status.WARN, f"MPI does not take device memory: {told[0]}",
            "messages go through the host; a CUDA-aware MPI with UCX would send them directly",
        )  # fmt: skip

    return gathered(comm, "GPU", local, judge)


def network(comm: MPI.Intracomm, folder: Path) -> Finding:
    """InfiniBand devices, and the variables that choose transports."""

    def local() -> tuple[str, str]:
        devices = Path("/sys/class/infiniband")
        names = sorted(p.name for p in devices.iterdir()) if devices.is_dir() else []
        ours = [f"OMPI_MCA_{part}" for part in ("pml", "mtl", "btl", "osc", "coll_")]
        prefixes = ("UCX_", "FI_", "MPIR_CVAR_", "MPICH_", *ours)
        chosen = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(prefixes))
        return ", ".join(names) or "no InfiniBand", " ".join(chosen[:6])

    def judge(found: list[tuple[str, str]]) -> Finding:
        kinds = sorted({devices for devices, _ in found})
        if len(kinds) > 1:
            return Finding(
                "network", Status.WARN, f"nodes differ: {kinds}", "ask for nodes of one kind"
            )
        return Finding("network", Status.OK, f"{kinds[0]}; {found[0][1] or 'no variables set'}")

    return gathered(comm, "network", local, judge)


def messages(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Latency and bandwidth from rank 0 to the last one."""

    def local() -> tuple[float, float]:
        last = comm.size - 1
        times = []
        for count, turns in ((1, 200), (1 << 22, 8)):
            buffer = np.zeros(count, np.uint8)
            start = perf_counter()
            for _ in range(turns):
                if comm.rank == 0 and last:
                    comm.Send(buffer, last)
                    comm.Recv(buffer, last)
                elif comm.rank == last and last:
                    comm.Recv(buffer, 0)
                    comm.Send(buffer, 0)
            times.append((perf_counter() - start) / turns / 2)
        return times[0], (1 << 22) / times[1]

    def judge(found: list[tuple[float, float]]) -> Finding:
        if comm.size == 1:
            return Finding("messages", Status.OK, "a single rank")
        latency, bandwidth = found[0]
        text = f"rank 0 to {comm.size - 1}: {1e6 * latency:.1f} us, {bandwidth / 1e9:.2f} GB/s"
        return Finding("messages", Status.OK, text)

    return gathered(comm, "messages", local, judge)


def checkpoints(comm: MPI.Intracomm, folder: Path) -> Finding:
    """What rank 0 writes and renames in the folder, all nodes see."""
    token = comm.bcast(uuid4().hex)
    target = folder / f".doctor-{token}"

    def write() -> int:
        if comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            beside = target.with_suffix(".unfinished")
            with beside.open("w") as file:
                file.write(token)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(target)
            return shutil.disk_usage(folder).free
        return 0

    def judge_write(found: list[int]) -> Finding:
        return Finding("checkpoints", Status.OK, f"{folder}: {found[0] >> 30} GiB free")

    def read() -> bool:
        for _ in range(20):
            if target.exists() and target.read_text() == token:
                return True
            sleep(0.1)  # a network file system may be late
        return False

    def judge_read(found: list[bool]) -> Finding:
        blind = [rank for rank, seen in enumerate(found) if not seen]
        if blind:
            return Finding(
                "checkpoints", Status.FAIL, f"{folder}: ranks {_runs(blind)} do not see rank 0's",
                "put run.dir on a file system that all nodes mount",
            )  # fmt: skip
        return written

    written = gathered(comm, "checkpoints", write, judge_write)
    if written.status is not Status.OK:
        return Finding(
            "checkpoints", Status.FAIL, written.text, "choose a folder that can be written"
        )
    seen = gathered(comm, "checkpoints", read, judge_read)
    comm.Barrier()
    if comm.rank == 0:
        target.unlink(missing_ok=True)
    return seen


def clocks(comm: MPI.Intracomm, folder: Path) -> Finding:
    """How far the ranks' clocks are apart."""

    def local() -> float:
        comm.Barrier()
        return time()

    def judge(found: list[float]) -> Finding:
        apart = max(found) - min(found)
        if apart > 1.0:
            return Finding(
                "clocks", Status.WARN, f"{apart:.2f} s apart", "run NTP or chrony on the nodes"
            )
        return Finding("clocks", Status.OK, f"within {1e3 * apart:.1f} ms")

    return gathered(comm, "clocks", local, judge)


def tuning(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Whether ``auto`` knows this allocation."""

    def local() -> str:
        with Communicator(comm) as own:
            own.Allreduce(MPI.IN_PLACE, np.zeros(1 << 16))
            return str(own.last_plan.reason) if own.last_plan else ""

    def judge(found: list[Any]) -> Finding:
        if comm.size > 1 and "measured on" not in found[0] and "tuned" not in found[0]:
            return Finding(
                "tuning", Status.WARN, f"auto: {found[0]}",
                "measure this allocation: python -m collectives tune -o tuned.json",
            )  # fmt: skip
        return Finding("tuning", Status.OK, f"auto, 512 KiB: {found[0]}")

    return gathered(comm, "tuning", local, judge)


def _runs(numbers: list[int]) -> str:
    """``0-3, 8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


CHECKS: tuple[Check, ...] = (
    packages,
    library,
    launcher,
    ranks,
    cores,
    shared_memory,
    gpus,
    network,
    messages,
    checkpoints,
    clocks,
    tuning,
)
