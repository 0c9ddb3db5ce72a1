"""One rank in trouble must end the whole job, soon, with its own words first.

These tests start the ranks themselves, with the launcher named by ``MPIEXEC`` (``mpirun``).
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCHER = os.environ.get("MPIEXEC", "mpirun")
pytestmark = pytest.mark.skipif(
    shutil.which(LAUNCHER) is None, reason=f"no MPI launcher {LAUNCHER!r}; set MPIEXEC to one"
)
PREAMBLE = """
    import os, signal, sys, time
    import numpy as np
    from mpi4py import MPI
    from collectives import Communicator
    from collectives.launch import abort_on_exception
    comm = Communicator(MPI.COMM_WORLD)
"""


def job(folder, body, ranks=3, **variables):
    """The completed job of a program that starts with ``PREAMBLE``; 60 s at most."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(body))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables,
    }
    return subprocess.run(
        [LAUNCHER, "-n", str(ranks), sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_exception_on_one_rank_ends_the_job(tmp_path):
    ended = job(
        tmp_path,
        """
        with abort_on_exception(comm):
            if comm.rank == 1:
                raise KeyError("the reason")
            comm.Barrier()
        """,
    )
    assert ended.returncode != 0
    assert "[rank 1 of 3 on " in ended.stderr
    assert "KeyError: 'the reason'" in ended.stderr
    assert "rank 0 of" not in ended.stderr


def test_an_exit_status_ends_the_job_with_it(tmp_path):
    ended = job(
        tmp_path,
        """
        with abort_on_exception(comm):
            if comm.rank == 2:
                sys.exit(3)
            comm.Barrier()
        """,
    )
    assert ended.returncode == 3


def test_a_peaceful_exit_ends_nothing(tmp_path):
    ended = job(
        tmp_path,
        """
        with abort_on_exception(comm):
            comm.Barrier()
            sys.exit(0)
        """,
    )
    assert ended.returncode == 0
    assert "rank" not in ended.stderr


def test_checking_ends_in_an_error_on_all_ranks(tmp_path):
    ended = job(
        tmp_path,
        """
        try:
            comm.Allreduce(MPI.IN_PLACE, np.zeros(5 + comm.rank // 2), algorithm="ring")
        except Exception as error:
            print(f"rank {comm.rank} saw: {error}", flush=True)
        """,
        COLLECTIVES_CHECK="1",
    )
    assert ended.returncode == 0
    for rank in range(3):
        assert (
            f"rank {rank} saw: the ranks' calls do not belong together: ranks 0, 1:" in ended.stdout
        )


def shared_files():
    """What lies in /dev/shm, but for MPICH's own: it leaves those of its channel behind."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("mpich_shm_")}


@pytest.mark.parametrize("end", ["comm.Abort(5)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_dead_rank_leaves_no_shared_memory(tmp_path, end):
    before = shared_files()
    ended = job(
        tmp_path,
        f"""
        window = comm.empty(1 << 20, float)
        window[...] = comm.rank
        comm.Allreduce(MPI.IN_PLACE, window, algorithm="direct")
        if comm.rank == 1:
            {end}
        comm.Allreduce(MPI.IN_PLACE, window, algorithm="direct")
        """,
    )
    assert ended.returncode != 0
    assert shared_files() <= before
