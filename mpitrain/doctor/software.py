"""Checks of what is installed: packages, MPI, its threads, its launcher."""

import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mpi4py import MPI

from collectives import LaunchError, check_launch, provenance
from collectives.calls.native import THREAD_LEVELS
from mpitrain.doctor.finding import Finding, fail, gathered, ok, warn

_NEEDED = ("mpi4py", "numpy")
_EXTRA = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "torch")


def packages(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Versions, the same on all ranks."""

    def local() -> str:
        found = [f"{name} {version(name)}" for name in _NEEDED]
        for name in _EXTRA:
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                continue
        return f"Python {platform.python_version()}, {', '.join(found)}"

    return gathered(comm, "packages", local, judge_packages)


def judge_packages(found: list[str]) -> Finding:
    if len(set(found)) > 1:
        return fail(
            f"differ: {'; '.join(sorted(set(found)))}",
            "start all ranks from one environment, on a file system that all nodes see",
        )
    return ok(found[0])


def library(comm: MPI.Intracomm, folder: Path) -> Finding:
    """MPI's vendor, version, standard and the files that it was loaded from."""

    def local() -> tuple[str, list[str]]:
        standard = ".".join(map(str, MPI.Get_version()))
        text = f"{provenance()['mpi']}, MPI standard {standard}"
        abi = getattr(MPI, "Get_abi_version", lambda: (-1, -1))()
        if abi[0] >= 1:
            text += f", ABI {'.'.join(map(str, abi))}"
        # Names of folders need not be text.
        maps = Path("/proc/self/maps").read_text("utf-8", errors="replace")
        return text, mpi_libraries(maps.splitlines())

    return gathered(comm, "MPI", local, judge_library)


def mpi_libraries(maps: Iterable[str]) -> list[str]:
    """The MPI libraries among the lines of ``/proc/PID/maps``."""
    pattern = re.compile(r"(/.*/lib(?:mpi|mpich|mpi_abi)\.so[.\d]*)$")
    return sorted({match[1] for line in maps if (match := pattern.search(line.rstrip()))})


def judge_library(found: list[tuple[str, list[str]]]) -> Finding:
    texts = sorted({text for text, _ in found})
    if len(texts) > 1:
        return fail(
            f"ranks differ: {'; '.join(texts)}",
            "load one MPI on all nodes: the same module, or the same virtual environment",
        )
    for _, paths in found:
        if len({str(Path(path).parent) for path in paths}) > 1:
            return warn(
                f"{texts[0]}; one process has loaded {' and '.join(paths)}",
                "clear LD_LIBRARY_PATH and LD_PRELOAD, so that only mpi4py's MPI is loaded",
            )
    where = ", ".join(found[0][1]) or "linked statically or not named libmpi"
    return ok(f"{texts[0]}, {where}")


def threads(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Threads that may call MPI."""
    return gathered(comm, "threads", MPI.Query_thread, judge_threads)


def judge_threads(found: list[int]) -> Finding:
    """Checkpoints are written by a thread, which makes no MPI call but must be allowed to exist."""
    lowest = min(found)
    text = f"MPI's thread level is {THREAD_LEVELS[lowest]}"
    if lowest == MPI.THREAD_SINGLE:
        return warn(
            f"{text}, and checkpoints are written by a thread",
            "unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or use an MPI built for threads",
        )
    if lowest < MPI.THREAD_MULTIPLE:
        text += "; the watchdog of COLLECTIVES_TIMEOUT then ends its own rank only"
    return ok(text)


def launcher(comm: MPI.Intracomm, folder: Path) -> Finding:
    """The launcher started the number of ranks that the library sees."""

    def local() -> str:
        try:
            check_launch(comm.size)
        except LaunchError as error:
            return str(error)
        return ""

    def judge(found: list[str]) -> Finding:
        wrong = [text for text in found if text]
        if wrong:
            text, _, fix = wrong[0].partition("; ")
            return fail(text, fix or "use the mpirun of this MPI")
        count = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
        return ok(f"{count}, as started")

    return gathered(comm, "launcher", local, judge)
