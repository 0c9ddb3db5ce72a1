"""Launchers of processes, and a check that MPI sees all processes that a launcher started.

A launcher and an MPI library that do not fit make every process rank 0 of 1: plain ``srun`` with an
Open MPI that expects PMIx, another MPI's ``mpirun``, ``torchrun``.  Nothing fails then, and each
process works alone on its own copy of the job.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from collectives.environment import switch
from collectives.errors import LaunchError

#: Prefixes of variables that launchers and allocations set.  A process that starts a job of its own
#: must not have such variables.
PREFIXES = (
    "OMPI_", "PMI", "PRTE_", "PRRTE_", "HYDRA_", "HYDI_", "MPIR_", "MPI_LOCAL", "MV2_COMM_",
    "MVP_COMM_", "SLURM_", "FLUX_", "PBS_", "PALS_", "JSM_", "LSB_", "TORCHELASTIC_",
)  # fmt: skip
#: Prefixes of the names of launchers' processes.
PROCESSES = ("mpiexec", "mpirun", "prterun")

_ALONE = "COLLECTIVES_ALONE"
_OPEN_MPI, _MPICH = "Open MPI", "MPICH"
_MPIRUN = {"": "start with '{mpirun} -n {n}'"}


class Started(NamedTuple):
    """Number of processes that a launcher has started, as read from one process's environment.

    Attributes:
        variable: the environment variable that gives it.
        value: the variable's value.
        processes: the number of processes, or a lower bound.
    """

    variable: str
    value: int
    processes: int


class Launcher(NamedTuple):
    """A launcher of processes.

    Attributes:
        name: its name in messages.
        mark: an environment variable that it sets in each process, and that an allocation alone
            does not set.
        sizes: variables with the number of processes, the most reliable first; the number on one
            node is a lower bound.
        rank: the variable with the number of this process, from 0.
        cures: the right way to start, by MPI library; "" is any other library.
        serves: the MPI library that it belongs to; empty if it belongs to none.
        holds: whether it may have started a shell or a daemon, in which another launcher has
            started this process.
    """

    name: str
    mark: str
    sizes: tuple[str, ...]
    rank: str
    cures: Mapping[str, str]
    serves: str = ""
    holds: bool = False

    def started(self, environment: Mapping[str, str]) -> Started:
        """Number of processes, from this process's environment."""
        found = Started("", 0, 0)
        for name in self.sizes:
            if size := _number(environment.get(name)):
                found = Started(name, size, size)
                break
        rank = _number(environment.get(self.rank))
        return Started(self.rank, rank, rank + 1) if rank >= max(found.processes, 1) else found

    def cure(self, vendor: str, processes: int) -> str:
        """The right way to start with MPI of this vendor."""
        text = self.cures.get(vendor) or self.cures[""]
        return text.format(mpirun=beside("mpirun") or "this MPI's mpirun", n=processes)


#: Launchers; the one that has most likely started the process itself comes first.
LAUNCHERS = (
    Launcher(
        "torchrun", "TORCHELASTIC_RUN_ID", ("WORLD_SIZE",), "RANK",
        {"": "start with '{mpirun} -n {n}' in its place, as torchrun starts no MPI"},
    ),
    Launcher(
        "jsrun", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",), "JSM_NAMESPACE_RANK",
        {"": "build mpi4py with the module of Spectrum MPI ('pip install --no-cache-dir "
             "--no-binary=mpi4py mpi4py'), or start with '{mpirun} -n {n}'"},
    ),
    Launcher(
        "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_RANK", _MPIRUN, serves=_OPEN_MPI,
    ),
    Launcher(
        "MVAPICH's mpirun_rsh", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",),
        "MV2_COMM_WORLD_RANK", _MPIRUN, serves=_MPICH,
    ),
    Launcher(
        "mpiexec of MPICH or Intel MPI", "MPI_LOCALNRANKS", ("PMI_SIZE", "MPI_LOCALNRANKS"),
        "PMI_RANK", _MPIRUN, serves=_MPICH,
    ),
    Launcher(
        "Cray's mpiexec or srun", "PALS_RANKID",
        ("PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PALS_LOCAL_SIZE"), "PALS_RANKID",
        {_OPEN_MPI: "start with 'mpiexec --pmi=pmix' (PBS) or 'srun --mpi=pmix' (SLURM)",
         "": "build mpi4py with Cray MPICH ('MPICC=\"cc -shared\" pip install --no-cache-dir "
             "--no-binary=mpi4py mpi4py')"},
        holds=True,
    ),
    Launcher(
        "flux run", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_RANK",
        {_OPEN_MPI: "start with 'flux run -o pmi=pmix' (the plugin flux-pmix)",
         "": "start with 'flux run -o pmi=simple', or Cray MPICH with '-o pmi=cray-pals'"},
        holds=True,
    ),
    Launcher(
        "srun", "SLURM_STEP_NUM_TASKS", ("SLURM_STEP_NUM_TASKS",), "SLURM_PROCID",
        {_OPEN_MPI: "start with 'srun --mpi=pmix', or with '{mpirun} -n {n}' in the allocation",
         "Intel MPI": "start with 'srun --mpi=pmi2' and I_MPI_PMI_LIBRARY=/PATH/libpmi2.so, or "
                      "with '{mpirun} -n {n}' in the allocation",
         "": "start with 'srun --mpi=pmi2', or with '{mpirun} -n {n}' in the allocation"},
        holds=True,
    ),
    Launcher("a launcher with PMI", "PMI_RANK", ("PMI_SIZE",), "PMI_RANK", _MPIRUN, holds=True),
    Launcher("a launcher with PMIx", "PMIX_RANK", (), "PMIX_RANK", _MPIRUN, holds=True),
    # Both are set by hand, too: one of them alone says nothing.
    Launcher("a launcher that sets RANK", "RANK", ("WORLD_SIZE",), "", _MPIRUN, holds=True),
)  # fmt: skip


def check_launch(size: int | None = None, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses to run where a launcher has started more processes than MPI sees.

    A shell or a notebook in an allocation of several tasks is one process, and accepted.  Several
    shells or daemons are accepted if this MPI's own launcher started the processes that MPI sees.
    Where a launcher gives only ranks, all but rank 0 are refused, and their exit status makes the
    launcher end rank 0.

    Args:
        size: number of ranks that MPI sees; the size of ``MPI.COMM_WORLD`` by default.  A program
            of sessions has no such communicator, and nothing is refused.
        environment: the process's variables; with ``COLLECTIVES_ALONE`` on, nothing is refused.

    Raises:
        LaunchError: the message names the variable and the ways out.
        ValueError: ``COLLECTIVES_ALONE`` is neither on nor off.

    Cost: a dozen look-ups, some 10 us.
    """
    from mpi4py import MPI

    if size is None:
        if not MPI.Is_initialized():
            return
        size = MPI.COMM_WORLD.size
    vendor, version = MPI.get_vendor()
    found = excess(size, vendor, environment)
    if found is None or switch(_ALONE, environment):
        return
    launcher, started = found
    seen = "this process is rank 0 of 1" if size == 1 else f"MPI has {size} ranks"
    raise LaunchError(
        f"{seen}, but {started.variable}={started.value}: {launcher.name} and this MPI ({vendor} "
        f"{'.'.join(map(str, version))}) do not belong together; "
        f"{launcher.cure(vendor, started.processes)}, or set {_ALONE}=1 if "
        f"{'it is' if size == 1 else 'they are'} to work alone"
    )


def excess(
    size: int, vendor: str, environment: Mapping[str, str]
) -> tuple[Launcher, Started] | None:
    """The launcher that has certainly started more processes than MPI sees, or ``None``.

    Args:
        size: number of ranks of ``MPI.COMM_WORLD``.
        vendor: name of the MPI library, as mpi4py spells it.
        environment: the process's variables.
    """
    found = [(each, each.started(environment)) for each in LAUNCHERS if each.mark in environment]
    serves = _OPEN_MPI if vendor == _OPEN_MPI else _MPICH
    fits = any(each.serves == serves and started.processes == size for each, started in found)
    for launcher, started in found:
        if started.processes > size and not (fits and (launcher.holds or size > 1)):
            return launcher, started
    return None


def beside(command: str) -> str | None:
    """Path of a command of this MPI beside the interpreter, where wheels of MPI install it."""
    return shutil.which(command, path=str(Path(sys.executable).parent))


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
