"""Going on without a rank that died, where Open MPI's ULFM can."""

import subprocess
import sys

import mpi4py
import numpy as np
import pytest

from mpitrain.checkpoint.reader import CheckpointReader
from tests.launch.programs import LAUNCHER, ROOT

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

ULFM = MPI.get_vendor()[0] == "Open MPI"
needs_ulfm = pytest.mark.skipif(not ULFM, reason="ULFM is Open MPI's")
# Experimental, so that no other work waits for it: make test-full runs these.


def train(folder, ranks, *words, launch=("--with-ft", "ulfm"), settings=()):
    program = [sys.executable, "-m", "tests.drills.train", "train"]
    command = [LAUNCHER, *launch, "-n", str(ranks), *program]
    command += [str(ROOT / "tests/drills/drill.toml"), *words]
    # Before step 18, the newest checkpoint is that of step 15.
    for setting in (f"run.dir={folder}", "checkpoint.background=false", *settings):
        command += ["--set", setting]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def parameters(folder):
    checkpoint = CheckpointReader(sorted((folder / "checkpoints").glob("step-*"))[-1])
    assert checkpoint.manifest.progress.step == 60
    return {name: checkpoint.tensor("parameters", name) for name in checkpoint.manifest.shapes}


@needs_ulfm
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("zero", [0, 3])
def test_the_others_go_on_as_if_they_had_been_started_again(tmp_path, rank, zero):
    settings = ["parallel.pipe=1", f"parallel.zero={zero}"]
    fault = ["--fault", f"kill rank={rank} step=18"]
    shrunk = train(tmp_path / "shrunk", 4, "--shrink", *fault, settings=settings)
    assert shrunk.returncode == 0, shrunk.stderr
    assert "1 of 4 ranks died; 3 go on from the newest checkpoint" in shrunk.stderr
    assert "resumed after step 15" in shrunk.stdout
    killed = train(tmp_path / "again", 4, *fault, launch=(), settings=[*settings, SEALED])
    assert killed.returncode != 0
    again = train(tmp_path / "again", 3, "--resume", launch=(), settings=[*settings, SEALED])
    assert again.returncode == 0, again.stderr
    expected = parameters(tmp_path / "again")
    for name, values in parameters(tmp_path / "shrunk").items():
        np.testing.assert_array_equal(values, expected[name])


#: As with --shrink, so that the sums are those of the same algorithms.
SEALED = "parallel.checksums=true"


@needs_ulfm
@pytest.mark.slow
def test_ranks_that_are_too_few_stop_and_can_be_resumed(tmp_path):
    few = train(tmp_path, 4, "--shrink", "--fault", "kill rank=3 step=18")
    assert few.returncode == 75, few.stderr
    assert "1 of 4 ranks died; parallel: data 1 x pipe 2 x tensor 1 needs 2 ranks" in few.stderr
    resumed = train(tmp_path, 2, "--resume", launch=())
    assert resumed.returncode == 0, resumed.stderr


def test_it_is_refused_where_a_death_would_end_all(tmp_path):
    refused = train(tmp_path, 2, "--shrink", launch=())
    assert refused.returncode == 2
    assert "--shrink needs Open MPI, started with 'mpirun --with-ft ulfm'" in refused.stderr
