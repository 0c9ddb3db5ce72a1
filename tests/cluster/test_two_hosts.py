"""Two hosts with two ranks each, on one machine: what crosses a network, and what must not."""

import subprocess
import sys

import pytest

from tests.cluster.hosts import environment

PROGRAM = """
import numpy as np
from mpi4py import MPI
from collectives import Communicator
from collectives.algorithms import names

comm = Communicator(MPI.COMM_WORLD)
assert (comm.nodes, comm.ranks_per_node) == (2, 2)
total = comm.size * (comm.size - 1) // 2
algorithms = [*names("allreduce"), "auto", "native", "hierarchical:local=2,segments=4",
              "hierarchical:local=2,intra=direct,inter=butterfly", "leaders:local=2"]
for algorithm in algorithms:
    for count in (0, 1, 1000, 100_000):
        items = comm.empty(count, np.float64)  # ordinary memory: the hosts share none
        items[...] = comm.rank
        comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
        assert (items == total).all(), algorithm
comm.Allreduce(MPI.IN_PLACE, np.zeros(1 << 20), algorithm="auto")
why = comm.last_plan.reason
assert "the table has no allreduce of ordinary arrays" in why, why
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
items = node.empty(1000, np.float64)
items[...] = comm.rank
node.Allreduce(MPI.IN_PLACE, items, algorithm="direct")
assert (items == (1 if comm.rank < 2 else 5)).all()
everybody = comm.gather(MPI.Get_processor_name())
if comm.rank == 0:
    print("right on", *everybody, flush=True)
"""


def told(up, ranks, *words, **variables):
    """Output of ``python words`` on so many ranks of each host."""
    done = up.run(
        0, up.mpirun(ranks, [sys.executable, *words]), env=environment() | variables,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_every_all_reduce_on_two_hosts(two_hosts, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    assert "right on node0 node0 node1 node1" in told(two_hosts, 2, str(tmp_path / "program.py"))


def test_a_reduce_scatter_of_ours_brings_half_of_the_buffer_out_of_a_host(two_hosts):
    lines = told(two_hosts, 1, "-m", "benchmarks.host_bytes").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if "`" in line]
    ours = {name.strip("`"): float(least) for name, _, least, _ in rows}
    halves = dict.fromkeys(("reduce_scatter", "allgather", "alltoall", "gather", "scatter"), 0.5)
    assert ours == {**halves, **dict.fromkeys(("allreduce", "broadcast", "reduce"), 1.0)}


GAINS = """
import numpy as np
from mpi4py import MPI
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, np.zeros(1 << 18, np.float32))
"""


def test_what_was_tuned_on_two_hosts_is_taken_there_without_a_word(two_hosts, tmp_path):
    (tmp_path / "program.py").write_text(GAINS)
    gains = ("run", "--gains", str(tmp_path / "program.py"))
    tune = ("tune", "allreduce", "-b", "1M", "-e", "1M", "--repeats", "1", "--passes", "1")
    before, tuned, after = (
        told(two_hosts, 2, "-m", "collectives", *words, XDG_CONFIG_HOME=str(tmp_path))
        for words in (gains, tune, gains)
    )
    command = "mpitrain submit --nodes 2 --ranks-per-node 2 -m collectives tune measures it"
    lacks = "it lacks rules of several nodes, where the library serves calls"
    assert f"chosen by the built-in table; {lacks}: {command}\n" in before
    table = f"{tmp_path}/collectives/tuned.json"
    assert f"wrote {table}; auto uses it" in tuned
    assert f"chosen by {table}; nothing was measured in this run" in after
    assert "in the table for 4 ranks)" in after


@pytest.mark.slow
def test_a_job_on_a_shaped_link_is_beside_its_virtual_cluster():
    """A step on 40 Mb/s is as long as its bytes say, on hosts and on virtual ranks."""
    words = [sys.executable, "-m", "benchmarks.shaped_link", "--rate", "40", "--steps", "4"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    if "network namespaces need" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["data", "pipe", "zero"]
    for _, measured, predicted, _ in rows:
        assert min(float(measured), float(predicted)) > 1e3 * 4e6 * 8 / 40e6 / 2
