"""The job scripts on a real SLURM of two nodes."""

import glob
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from mpitrain.checkpoint.reader import CheckpointReader
from tests.cluster.slurm import missing
from tests.launch.programs import DIGITS, ROOT, run
from tests.processes import running, until

#: SLURM's plugin loads the system's PMIx by this name.
PMIX = ("pmix",) if glob.glob("/usr/lib*/libpmix.so") + glob.glob("/usr/lib/*/libpmix.so") else ()
#: How each MPI's ranks are started.
LAUNCHERS = {"Open MPI": (*PMIX, "mpirun"), "MPICH": ("pmi2",)}


def vendor():
    words = [sys.executable, "-c", "from mpi4py import MPI; print(MPI.get_vendor()[0])"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


KINDS = LAUNCHERS.get(vendor(), ()) if missing() is None else ("none",)


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a script of jobs/, with its output in the test's folder."""

    def run(script, *arguments, options=(), kind=KINDS[0], **env):
        output = str(tmp_path / "%x-%A.out")
        environment = {"MPITRAIN_PYTHON": sys.executable, "MPITRAIN_LAUNCHER": kind, **env}
        return cluster.sbatch(
            "--output", output, *options, f"jobs/{script}", *arguments, env=environment
        )

    return run


def told(folder):
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.out")))


STEPS = 250


def paused(step, seconds):
    """Environment of a job whose rank 0 stands still before a step."""
    fault = f"pause,rank=0,step={step},seconds={seconds}"
    return {"MPITRAIN_WRAP": f"{sys.executable} -m tests.drills.train --fault {fault}"}


#: Makes a job last on any machine until something has happened to it, and no longer than
#: GraceTime; what is resumed is past that step, or pauses once more.
LASTING = paused(200, 6)


@pytest.fixture
def job(tmp_path):
    return written_job(tmp_path)


def written_job(folder):
    (folder / "job.toml").write_text(DIGITS.format(hidden=256, steps=STEPS))
    return str(folder / "job.toml")


def options(folder, name="run"):
    return ["--set", f"run.dir={folder}/{name}"]


def parameters(folder, steps=STEPS):
    checkpoint = CheckpointReader(sorted((folder / "checkpoints").glob("step-*"))[-1])
    checkpoint.verify()
    assert checkpoint.manifest.progress.step == steps
    return {name: checkpoint.tensor("parameters", name) for name in checkpoint.manifest.shapes}


def steps_done(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"event":"step"') if path.exists() else 0


def reach(folder, steps, seconds=60):
    assert until(lambda: steps_done(folder) >= steps, seconds), "the job does not get anywhere"


def gone(cluster, number, seconds):
    """Whether an array of jobs leaves the queue in time."""
    asked = ["squeue", "-h", "-j", number]
    return until(lambda: not cluster.run(asked, check=False).strip(), seconds, pause=0.3)


def ranks(folder):
    """Numbers of the processes of a job."""
    return [n for n, words in running(f"run.dir={folder}").items() if "python" in words[0]]


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The parameters that a job ends with when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    number = cluster.sbatch(
        "--output", str(folder / "job.out"), "jobs/train.sbatch", written_job(folder),
        *options(folder), env={"MPITRAIN_PYTHON": sys.executable, "MPITRAIN_LAUNCHER": KINDS[0]},
    )  # fmt: skip
    assert cluster.wait(number, 120) == "COMPLETED", told(folder)
    return parameters(folder / "run")


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_on_both_nodes(cluster, submit, tmp_path, job, kind):
    number = submit("train.sbatch", job, *options(tmp_path), "--set", "train.steps=3", kind=kind)
    assert cluster.wait(number, 60) == "COMPLETED", told(tmp_path)
    start = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["ranks"] == 4
    assert "on n[0-1], restart 0" in told(tmp_path)


def written(folder, *words):
    """The file of a script that ``mpitrain submit`` has written."""
    command = [sys.executable, "-m", "mpitrain", "submit", "--dry-run", *words]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MPITRAIN_")}
    done = subprocess.run(
        command, cwd=folder, env={**kept, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (folder / "written.sh").write_text(done.stdout)
    return str(folder / "written.sh")


def test_a_script_of_submit_needs_no_other_file(cluster, tmp_path, job):
    """It runs in a folder without jobs/, with modules' and the user's lines."""
    words = ["job.toml", "--set", "train.steps=3", "--set", "run.dir=run", "--cpus-per-task", "2"]
    words += ["--launcher", KINDS[0], "--mem", "100M", "--exclusive", "--directive", "nice=1"]
    script = written(tmp_path, *words, "--before", f"export PYTHONPATH={ROOT}")
    number = cluster.sbatch("--chdir", str(tmp_path), script)
    assert cluster.wait(number, 90) == "COMPLETED", told(tmp_path)
    start = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["ranks"] == 4


STOPS = """
import os, pathlib, signal, sys, time
own = pathlib.Path(f"state-{os.environ['SLURM_PROCID']}")
if own.exists():
    print("went on with", sys.argv[1:])
    sys.exit(0)
for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda *_: sys.exit(75))
own.touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "state", "said", "resumed"),
    [
        (["--batch", "--signal=USR1"], "COMPLETED", "jobs: stopped as told", 4),
        ([], "CANCELLED", "again, unless it was cancelled", 0),
    ],
)
def test_a_program_of_ones_own_comes_back_unless_it_was_cancelled(
    cluster, tmp_path, how, state, said, resumed
):
    (tmp_path / "mine.py").write_text(STOPS)
    script = written(tmp_path, "--launcher", "srun", "--restarts", "1", "mine.py", "--", "a b")
    number = cluster.sbatch("--chdir", str(tmp_path), script)
    assert until(lambda: len(list(tmp_path.glob("state-*"))) == 4), told(tmp_path)
    cluster.run(["scancel", *how, number])
    assert cluster.wait(number, 60) == state, told(tmp_path)
    text = told(tmp_path)
    assert "jobs: srun --kill-on-bad-exit=1 " in text and said in text
    assert text.count("went on with ['a b']") == resumed


def test_a_preempted_job_comes_back(cluster, submit, tmp_path, job, undisturbed):
    low = ["--partition=low"]
    number = submit("train.sbatch", job, *options(tmp_path), options=low, **LASTING)
    reach(tmp_path / "run", 20)
    other = cluster.sbatch(
        "--partition=high", "--nodes=2", "--ntasks-per-node=4", "--output=/dev/null",
        "--wrap", "sleep 1",
    )  # fmt: skip
    assert cluster.wait(other, 60) == "COMPLETED"
    assert cluster.wait(number, 120) == "COMPLETED", told(tmp_path)
    text = told(tmp_path)
    assert "stopped after step" in text and "resumed after step" in text
    same(parameters(tmp_path / "run"), undisturbed)


NOISY = """
import numpy as np

class Noisy:
    # Others in each epoch.


    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        place = np.random.default_rng(index).normal(size=8)
        return place + 0.1 * np.random.normal(size=8), int(place[0] > 0) + 2 * int(place[1] > 0)

def data():
    return Noisy(480), None
"""


def test_a_job_that_reads_ahead_comes_back(cluster, submit, tmp_path):
    """At the exact sample, with the noise of the epoch; no process that reads is left behind."""
    (tmp_path / "noisy.py").write_text(NOISY)
    text = DIGITS.format(hidden=256, steps=60).replace('name = "digits"', "workers = 2")
    text += f'[own]\ndata = "{tmp_path}/noisy.py:data"\nclasses = 4\n'
    (tmp_path / "job.toml").write_text(text)
    job = str(tmp_path / "job.toml")
    alone = submit("train.sbatch", job, *options(tmp_path, "alone"), "--set", "data.workers=0")
    assert cluster.wait(alone, 240) == "COMPLETED", told(tmp_path)
    number = submit("train.sbatch", job, *options(tmp_path), **paused(40, 6))
    reach(tmp_path / "run", 12, 120)
    assert len(ranks(tmp_path / "run")) == 4 * 3  # the ranks and those that read for them
    cluster.run(["scancel", "--batch", "--signal=USR1", number])
    assert cluster.wait(number, 240) == "COMPLETED", told(tmp_path)
    assert "stopped after step" in told(tmp_path) and "resumed after step" in told(tmp_path)
    same(parameters(tmp_path / "run", 60), parameters(tmp_path / "alone", 60))
    assert ranks(tmp_path / "run") == []


@pytest.mark.slow
def test_a_job_that_reaches_its_limit_comes_back(cluster, submit, tmp_path, job, undisturbed):
    # The signal comes 50 s before the limit of a minute, in a pause that makes the job last until
    # then; what is resumed is past that step.
    limits = ["--time=00:01:00", "--signal=B:USR1@50"]
    number = submit("train.sbatch", job, *options(tmp_path), options=limits, **paused(200, 15))
    assert cluster.wait(number, 150) == "COMPLETED", told(tmp_path)
    text = told(tmp_path)
    # srun may kill ranks that are on their way out, so that the status is not always 75.
    assert "told to stop" in text and "stopped after step" in text
    assert "resumed after step" in text
    same(parameters(tmp_path / "run"), undisturbed)


@pytest.mark.slow
def test_a_job_whose_node_fails_comes_back(cluster, submit, tmp_path, job, undisturbed):
    number = submit("train.sbatch", job, *options(tmp_path), **LASTING)
    reach(tmp_path / "run", 20)
    cluster.kill_node("n1")
    cluster.wait(number, 60, until={"PENDING", "REQUEUED", "COMPLETING"})
    cluster.revive_node("n1")
    assert cluster.wait(number, 180) == "COMPLETED", told(tmp_path) + cluster.logs()
    assert "resumed after step" in told(tmp_path)
    same(parameters(tmp_path / "run"), undisturbed)


@pytest.mark.slow
def test_a_task_of_an_array_comes_back_alone(cluster, submit, tmp_path, job):
    steps = 3000  # which take seconds on any machine
    settings = tmp_path / "settings.txt"
    settings.write_text(2 * f"optim.lr=0.1 train.steps={steps} checkpoint.every=100\n")
    number = submit("sweep.sbatch", str(settings), job, options=["--array=1-2"])
    runs = ROOT / "runs" / f"sweep-{number}"
    try:
        reach(runs / "2", 20)
        cluster.run(["scancel", "--batch", "--signal=USR1", f"{number}_2"])
        assert gone(cluster, number, 120), told(tmp_path)
        assert "resumed after step" in (tmp_path / f"mpitrain-sweep-{number}.out").read_text()
        same(parameters(runs / "2", steps), parameters(runs / "1", steps))
    finally:
        shutil.rmtree(runs, ignore_errors=True)


def test_a_sweep_leaves_a_run_for_each_line(cluster, submit, tmp_path, job):
    settings = tmp_path / "settings.txt"
    rates = (0.3, 0.1, 0.03, 0.01)
    settings.write_text("".join(f"optim.lr={rate} train.steps=30\n" for rate in rates))
    number = submit("sweep.sbatch", str(settings), job, options=["--array=1-4"])
    runs = ROOT / "runs" / f"sweep-{number}"
    try:
        assert gone(cluster, number, 90), told(tmp_path)
        assert [steps_done(runs / str(task)) for task in (1, 2, 3, 4)] == [30] * 4
        compared = run(ROOT, "-m", "mpitrain", "compare", runs)
        assert compared.returncode == 0, compared.stderr
        assert compared.stdout.count("\n") >= 5 and "optim.lr" in compared.stdout
    finally:
        shutil.rmtree(runs, ignore_errors=True)
