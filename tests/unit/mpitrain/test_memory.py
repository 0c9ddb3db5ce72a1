"""Memory that the arrays of a step leave to those of the next one."""

import platform
import subprocess
import sys

import pytest

_STEPS = """
import resource
from pathlib import Path
from mpi4py import MPI
from mpitrain.config import load
from mpitrain.start import start
data = ["data.path=jobs/examples/license.txt", "train.epochs=1", "train.steps=8"]
faults = []
with start(MPI.COMM_SELF, load(Path("jobs/examples/gpt_data.toml"), data)) as loop:
    for _ in loop.steps(0):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-5])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of glibc is told")
def test_steps_take_few_page_faults():
    found = subprocess.run(
        [sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(found.stdout.split()[-1]) < 1000
