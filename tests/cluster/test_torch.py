"""Scripts for PyTorch that ``srun`` starts on a real SLURM of two nodes."""

import os
import signal
import sys

import pytest

from tests.cluster.test_slurm import KINDS
from tests.launch.programs import needs_torch
from tests.processes import until

pytestmark = [pytest.mark.slow, needs_torch]
PLUGINS = [kind for kind in KINDS if kind.startswith("pm")]
SCRIPT = """
import os, pathlib, socket, sys, time
import torch, torch.distributed as dist
dist.init_process_group("mpi")
rank = dist.get_rank()
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
store = dist.distributed_c10d._get_default_store()
if rank == 3:
    store.set("where", socket.gethostname())
assert store.get("where") == b"n1"
names = [None] * dist.get_world_size()
dist.all_gather_object(names, socket.gethostname() + os.environ["LOCAL_RANK"])
{then}
if rank == 0:
    print(total.item(), *names, flush=True)
dist.destroy_process_group()
"""


def srun(cluster, folder, plugin, then=""):
    """The process of the script on four ranks of both nodes."""
    path = folder / "script.py"
    path.write_text(SCRIPT.format(then=then))
    command = ["srun", "-N2", "--ntasks-per-node=2", f"--mpi={plugin}", "--kill-on-bad-exit=1"]
    return cluster.begin([*command, sys.executable, "-m", "collectives.torch", str(path)])


def ended(process):
    out, error = process.communicate(timeout=200)
    return process.returncode, out, error


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_script_has_ranks_on_both_nodes(cluster, tmp_path, plugin):
    status, out, error = ended(srun(cluster, tmp_path, plugin))
    assert status == 0, error
    assert out == "10.0 n00 n01 n10 n11\n"


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize(
    ("then", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("if rank == 2: sys.exit(3)\ndist.barrier()", 3, ""),
        ("if rank == 3: raise ValueError('here')\ndist.barrier()", 1, "ValueError: here"),
    ],
)
def test_the_exit_status_is_that_of_the_rank(cluster, tmp_path, plugin, then, status, said):
    found, out, error = ended(srun(cluster, tmp_path, plugin, then))
    assert said in error and out == ""
    if plugin == "pmi2" and found == 137:  # srun's is the highest, that of the ranks it has killed
        assert f"Exited with exit code {status}" in error
    else:
        assert found == status, error


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_rank_that_is_killed_ends_the_job(cluster, tmp_path, plugin):
    then = "pathlib.Path(sys.argv[0] + f'.{rank}').write_text(str(os.getpid()))\n"
    then += "time.sleep(rank == 3 and 200)\ndist.barrier()"
    process, numbers = srun(cluster, tmp_path, plugin, then), tmp_path / "script.py.3"
    try:
        assert until(lambda: numbers.exists() and numbers.read_text(), 200)
        os.kill(int(numbers.read_text()), signal.SIGKILL)
        status, out, error = ended(process)
    finally:
        process.kill()
    assert status not in (0, None) and out == ""
    assert "rank 3" in error
