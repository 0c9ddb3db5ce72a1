"""The fit of the search's model to a file of measured layouts."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.vtrain import Row, predicted

ROOT = Path(__file__).parents[3]
HEAD = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)


@pytest.mark.slow
def test_layouts_that_the_model_made_are_predicted(tmp_path):
    truth = np.array([2e14, 1e12, 5e-4, 1e11, 1e10])
    lines = [HEAD]
    for width in (1024, 2048, 4096):
        layouts = (1, 8, 1), (2, 2, 2), (1, 2, 4), (4, 4, 1), (2, 8, 1), (1, 1, 8)
        for pipe, data, tensor in layouts:
            row = Row(pipe * data * tensor, 64, 2, width, 16, 24, 1024, (pipe, data, tensor), 0.0)
            seconds = predicted(row, truth)
            lines.append(",".join(map(str, [*row[:7], tensor, data, pipe, 1e3 * seconds])))
    path = tmp_path / "measured.csv"
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    words = [sys.executable, "-m", "benchmarks.vtrain", str(path)]
    told = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert float(told.partition("mean ")[2].partition("%")[0]) < 10, told
