"""Jobs under a stand-in for PBS and PALS: submitted, run for real, stopped, queued again."""

import os
import subprocess
import sys

import pytest

from mpitrain.checkpoint.reader import CheckpointReader
from tests.launch.programs import DIGITS, LAUNCHER, ROOT, scratch
from tests.pbs import Pbs, Refused, check, directives

JOB = DIGITS.format(hidden=64, steps=60)
pytestmark = scratch


@pytest.fixture
def pbs(tmp_path):
    return Pbs(tmp_path / "pbs", LAUNCHER)


def submit(pbs, folder, *words, launcher="pals", **environment):
    """Output of ``mpitrain submit``, called in this folder."""
    command = [sys.executable, "-m", "mpitrain", "submit", "--scheduler", "pbs", *words]
    command[6:6] = ["--account", "A", "--launcher", launcher, "--nodes", "1"]
    command[6:6] = ["--before", f"export PYTHONPATH={ROOT}"]
    given = {k: v for k, v in os.environ.items() if not k.startswith(("MPITRAIN_", "COLLECTIVES_"))}
    given |= {"PATH": f"{pbs.commands}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def told(folder, number, name="mpitrain"):
    return (folder / f"{name}.o{number}").read_text()


def test_a_job_of_pbs_trains_on_two_ranks(pbs, tmp_path):
    """The script has all that it needs: nothing of jobs/ is where it runs."""
    (tmp_path / "a job.toml").write_text(JOB)
    words = ["a job.toml", "--set", "train.steps=3", "--name", "digits", "--time", "5"]
    assert submit(pbs, tmp_path, *words, "--directive", "filesystems=home:flare") == "1.server"
    assert pbs.drain() == [0], told(tmp_path, 1, "digits")
    out = told(tmp_path, 1, "digits")
    assert "mpiexec -n 2 --ppn 2 --cpu-bind depth --depth 1 " in out
    assert "jobs: job 1 on x0, restart 0" in out and ", 2 ranks" in out
    assert not list(tmp_path.glob(".mpitrain-*"))


@pytest.mark.slow
def test_a_job_that_reaches_its_walltime_comes_back(pbs, tmp_path):
    """With the bits of a job that nothing happened to."""
    (tmp_path / "job.toml").write_text(JOB)
    pause = "--fault pause,rank=0,step=30,seconds=30"
    wrap = ["--wrap", f"{sys.executable} -m tests.drills.train {pause}"]
    for name, more, time in (("one", [], "5"), ("two", wrap, "0:1:0")):
        run = ["--set", f"run.dir={name}", "--name", name, "--time", time]
        submit(pbs, tmp_path, "job.toml", *run, *more)
    assert pbs.drain() == [0, 75, 0], told(tmp_path, 2, "two")
    assert "told to stop" in told(tmp_path, 2, "two")
    assert "queueing 2 again\n3.server" in told(tmp_path, 2, "two")
    third = told(tmp_path, 3, "two")
    assert "job 3 on x0, restart 1" in third and "resumed after step" in third
    one, two = (
        CheckpointReader(sorted((tmp_path / name / "checkpoints").glob("step-*"))[-1])
        for name in ("one", "two")
    )
    for name in one.manifest.shapes:
        assert (one.tensor("parameters", name) == two.tensor("parameters", name)).all()


#: Starts the program once, without MPI.
ONE_RANK = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift 2; done\nexec "$@"\n'
PROGRAM = """
import os, sys, time
print("arguments", sys.argv[1:], flush=True)
state, status = sys.argv[1], int(sys.argv[2])
if os.path.exists(state):
    sys.exit(0)
open(state, "w").close()
if status == 15:
    os.kill(os.getppid(), 15)  # as qdel: PBS's signal to the job's shell
    time.sleep(20)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("status", "statuses"),
    [
        (75, [75, 0]),
        (1, [1]),
        pytest.param(139, [139, 0], marks=pytest.mark.slow),
        pytest.param(2, [2], marks=pytest.mark.slow),
        pytest.param(127, [127], marks=pytest.mark.slow),
    ],
)
def test_a_program_of_ones_own_comes_back_as_a_job_does(pbs, tmp_path, status, statuses):
    (tmp_path / "mine.py").write_text(PROGRAM)
    (pbs.commands / "mpiexec").write_text(ONE_RANK)
    submit(pbs, tmp_path, "mine.py", "--restarts", "1", "--", "a state; x", str(status))
    assert pbs.drain() == statuses, told(tmp_path, 1)
    for number in range(1, len(statuses) + 1):
        assert f"arguments ['a state; x', '{status}']" in told(tmp_path, number)


STOPS = """
import os, signal, sys, time
if os.path.exists("state"):
    sys.exit(0)
signal.signal(signal.SIGUSR1, lambda *_: (open("state", "w").close(), sys.exit(75)))
time.sleep(30)
"""


def test_ranks_are_told_before_the_walltime_ends(pbs, tmp_path):
    (tmp_path / "mine.py").write_text(STOPS)
    (pbs.commands / "mpiexec").write_text(ONE_RANK)
    submit(pbs, tmp_path, "mine.py", "--time", "0:0:10", "--restarts", "1")
    assert pbs.drain() == [75, 0], told(tmp_path, 1)
    assert "told to stop" in told(tmp_path, 1) and "queueing 1 again\n2." in told(tmp_path, 1)


def test_a_job_that_is_deleted_is_not_queued_again(pbs, tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    (pbs.commands / "mpiexec").write_text(ONE_RANK)
    submit(pbs, tmp_path, "mine.py", "--", "state", "15")
    pbs.drain()
    assert "PBS ends the job, and it is not queued again" in told(tmp_path, 1)
    assert not (tmp_path / "mpitrain.o2").exists()


def test_the_script_of_jobs_is_what_pbs_takes(pbs, tmp_path):
    """Its arguments come in a variable, as qsub gives a script none."""
    text = (ROOT / "jobs/train.pbs").read_text()
    chunk = {"count": 2, "ncpus": 2, "mpiprocs": 2, "ompthreads": 1}
    assert check(directives(text) | {"-A": "A"}) == chunk
    with pytest.raises(Refused, match="Account_Name"):
        check(directives(text))
    (pbs.commands / "mpiexec").write_text('#!/bin/bash\necho "$PWD:" "$@"\n')
    given = {**os.environ, "PATH": f"{pbs.commands}:/usr/bin:/bin", "MPITRAIN_LAUNCHER": "pals"}
    given |= {"MPITRAIN_HOME": str(ROOT), "MPITRAIN_ARGUMENTS": "-m x"}
    names = "MPITRAIN_HOME,MPITRAIN_ARGUMENTS,MPITRAIN_LAUNCHER"
    (tmp_path / "own.pbs").write_text(text.replace("#PBS -r y", "#PBS -r y\n#PBS -A A"))
    words = [pbs.commands / "qsub", "-v", names, tmp_path / "own.pbs"]
    subprocess.run(words, cwd=tmp_path, env=given, check=True)
    assert pbs.drain() == [0]
    assert f"{tmp_path}: -n 4 --ppn 2 --cpu-bind depth" in told(tmp_path, 1)
