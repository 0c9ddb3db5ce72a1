"""``python -m mpitrain.bench.ddp``: a GPT's step beside DistributedDataParallel's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
LAUNCHER = os.environ.get("MPIEXEC", "mpirun")
pytestmark = [
    pytest.mark.usefixtures("scratch"),
    pytest.mark.skipif(
        shutil.which(LAUNCHER) is None, reason=f"no MPI launcher {LAUNCHER!r}; set MPIEXEC to one"
    ),
]
SMALL = "--vocabulary=11 --context=4 --width=8 --blocks=1 --heads=1 --batch=2 --steps=2 --warmup=1"


def test_all_rows_are_measured(tmp_path):
    told = tmp_path / "ddp.json"
    command = [LAUNCHER, "-n", "2", sys.executable, "-m", "mpitrain.bench.ddp", *SMALL.split()]
    done = subprocess.run(
        [*command, f"--json={told}"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "our layers" in done.stdout and "hidden by overlap" in done.stdout
    assert all(len(found) == 2 for found in json.loads(told.read_text())["rows"].values())
