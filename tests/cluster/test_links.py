"""A link that is made up beside one that the kernel shapes: two hosts, the same all-reduces."""

import json
import subprocess
import sys

import pytest

from tests.cluster.hosts import NoHosts, environment, hosts

RATE_MBIT = 100

PROGRAM = """
import json, sys
from statistics import median
from time import perf_counter
import numpy as np
from mpi4py import MPI
from collectives import Communicator, MPITransport, delayed

transport = delayed(sys.argv[1]) if len(sys.argv) > 1 else MPITransport
comm = Communicator(MPI.COMM_WORLD, transport=transport)
found = {}
for count in (1, 1_000_000):
    data, seconds = np.zeros(count, np.float32), []
    for turn in range(8):
        MPI.COMM_WORLD.Barrier()
        begin = perf_counter()
        comm.Allreduce(MPI.IN_PLACE, data, algorithm="ring")
        if turn > 2:
            seconds.append(perf_counter() - begin)
    found[count] = MPI.COMM_WORLD.allreduce(median(seconds), MPI.MAX)
if comm.rank == 0:
    print(json.dumps(found), flush=True)
"""


def measured(output):
    line = next(line for line in output.splitlines() if line.startswith("{"))
    return {int(count): seconds for count, seconds in json.loads(line).items()}


@pytest.mark.parametrize("delay_ms", [None, 40])  # not every kernel can delay
def test_a_made_up_link_takes_as_long_as_a_shaped_one(tmp_path, delay_ms):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = {"env": environment(), "capture_output": True, "text": True, "timeout": 120}
    try:
        with hosts(2, RATE_MBIT, delay_ms) as up:
            shaped = up.run(0, up.mpirun(1, [sys.executable, str(program)]), **options)
    except NoHosts as reason:
        pytest.skip(str(reason))
    assert shaped.returncode == 0, shaped.stderr
    link = f"latency={delay_ms or 0}ms,bandwidth={RATE_MBIT}Mb/s"
    command = [up.mpirun(1, [])[0], "-n", "2", sys.executable, str(program), link]
    made_up = subprocess.run(command, **options)
    assert made_up.returncode == 0, made_up.stderr
    real, ours = measured(shaped.stdout), measured(made_up.stdout)
    for count in real if delay_ms else [max(real)]:
        # A ring of two ranks: two rounds, each of half of the vector.
        least = 2 * (delay_ms or 0) / 1e3 + 4 * count * 8 / (RATE_MBIT * 1e6)
        assert ours[count] >= least
        # The kernel's link has a burst of 1 MB, and TCP's windows, on top or less.
        assert real[count] / 3 < ours[count] < 3 * real[count], count
