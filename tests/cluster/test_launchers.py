"""Who is refused, and who is not, under a real SLURM of two nodes."""

import sys

import pytest
from mpi4py import MPI

from collectives.launchers import beside
from tests.cluster.test_slurm import KINDS

pytestmark = pytest.mark.slow

#: Leaves a file, named by the ranks that work together.
PROGRAM = """
import sys
from pathlib import Path
from mpi4py import MPI
from collectives import Communicator
Path(sys.argv[1], f"{Communicator(MPI.COMM_WORLD).allreduce(1)}").touch()
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path), str(tmp_path)]


def worked(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.isdecimal())


#: With PMIx, this MPICH ends by itself.
WRONG = {"Open MPI": ("none", "pmi2", "cray_shasta"), "MPICH": ("none", "cray_shasta")}


@pytest.mark.parametrize("plugin", WRONG.get(MPI.get_vendor()[0], ()))
def test_no_rank_works_alone(cluster, program, tmp_path, plugin):
    with pytest.raises(RuntimeError, match="rank 0 of 1, but SLURM_STEP_NUM_TASKS=2: ") as told:
        cluster.run(["srun", "-N2", "-n2", f"--mpi={plugin}", *program])
    assert str(told.value).count("LaunchError: this process is rank 0 of 1") == 2
    assert worked(tmp_path) == []


@pytest.mark.parametrize("plugin", [kind for kind in KINDS if kind.startswith("pm")])
def test_the_plugin_of_this_mpi_is_fine(cluster, program, tmp_path, plugin):
    cluster.run(["srun", "-N2", "-n2", f"--mpi={plugin}", *program])
    assert worked(tmp_path) == ["2"]


@pytest.mark.parametrize("before", [["salloc", "-N2", "-n4"], ["srun", "-n1"]])
def test_one_process_in_an_allocation_is_fine(cluster, program, tmp_path, before):
    cluster.run([*before, *program])
    assert worked(tmp_path) == ["1"]


def test_tasks_that_each_start_a_job_of_their_own_are_fine(cluster, program, tmp_path):
    here = ["-launcher", "fork"] if MPI.get_vendor()[0] == "MPICH" else ["--host", "localhost"]
    command = [beside("mpiexec") or "mpiexec", *here, "-n", "1", *program]
    cluster.run(["srun", "-N1", "-n2", "sh", "-c", " ".join(command)])
    assert worked(tmp_path) == ["1"]
