"""``python -m benchmarks.gloo``: another library's row in a file like our benchmark's."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare import table

pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
ROOT = Path(__file__).parents[3]
EACH = ("allreduce", "allgather", "alltoall", "broadcast", "reduce_scatter")


def measured(collective, ranks, path):
    how = [collective, f"--ranks={ranks}", "-b8", "-e64", "--repeats=1", f"-J{path}"]
    command = [sys.executable, "-m", "benchmarks.gloo", *how]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return table([path]).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("collective", EACH)
def test_gloo_is_a_column_of_the_table(collective, tmp_path):
    heads, _, *rows = measured(collective, 2, tmp_path / "gloo.json")
    assert "Gloo (PyTorch" in heads and heads.count("|") == 3
    assert [row.split("|")[1].strip() for row in rows] == ["8 B", "64 B"]
    assert all(float(row.split("|")[2]) > 0 for row in rows)
