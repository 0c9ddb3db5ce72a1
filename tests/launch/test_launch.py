"""The command as a user starts it: processes of its own, a launcher, exit codes, its output."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.programs import MPITRAIN, ROOT, needs_launcher, run, scratch

EXAMPLES = ROOT / "jobs" / "examples"
pytestmark = scratch


def train(folder, *arguments, ranks=None):
    return run(folder, "-m", "mpitrain", "train", *arguments, ranks=ranks)


def metrics(folder):
    return [json.loads(line) for line in folder.joinpath("metrics.jsonl").open()]


def losses(folder):
    return [record["loss"] for record in metrics(folder) if record["event"] == "step"]


@needs_launcher
def test_two_ranks_report_once(tmp_path):
    done = train(
        tmp_path, EXAMPLES / "digits_mlp.toml", "--set", "train.epochs=3",
        "--set", "parallel.algorithm=ring", ranks=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks, gradients by ring (asked for)") == 1
    assert "\x1b" not in done.stdout
    curve = losses(tmp_path / "runs" / "digits_mlp")
    assert len(curve) == 3 * 23
    assert sum(curve[-5:]) < 0.5 * sum(curve[:5])
    summary = metrics(tmp_path / "runs" / "digits_mlp")[-1]
    assert (summary["event"], summary["ranks"], summary["algorithm"]) == ("summary", 2, "ring")
    assert 0 < summary["comm_share"] < 1


@needs_launcher
@pytest.mark.parametrize(
    "other",
    [
        ("eval", "job.toml"),
        pytest.param(("train", "other.toml", "--resume"), marks=pytest.mark.slow),
    ],
)
def test_command_lines_that_differ_are_refused(tmp_path, other):
    """Without it, the job of rank 0 counted, or the ranks of two commands waited for each other."""
    tmp_path.joinpath("job.toml").write_text("")
    second = (":", "-n", "1", *MPITRAIN, *other)
    done = train(tmp_path, "job.toml", *second, ranks=1)
    told = f"the command line is ['train', 'job.toml'] on rank 0 and {list(other)} on rank 1"
    assert done.returncode == 2 and done.stderr.count(told) == 1
    assert not tmp_path.joinpath("runs").exists()


@pytest.mark.slow
def test_one_rank_needs_no_launcher(tmp_path):
    done = train(
        tmp_path, EXAMPLES / "digits_mlp.toml", "--set", "train.epochs=2", "--set", "run.dir=out"
    )
    assert done.returncode == 0, done.stderr
    assert "1 rank, gradients not summed (one replica)" in done.stdout.splitlines()[-1]
    curve = losses(tmp_path / "out")
    assert sum(curve[-5:]) < 0.5 * sum(curve[:5])


#: Read by every interpreter that starts: these ranks have no scikit-learn and no matplotlib.
HIDE = """
import os, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
if rank in os.environ["WITHOUT"].split():
    sys.modules["sklearn"] = sys.modules["matplotlib"] = None
"""


@pytest.mark.slow
@needs_launcher
@pytest.mark.parametrize(("without", "where"), [("0 1", ""), ("1", " (rank 1 of 2, on ")])
def test_a_package_that_is_missing_is_named_once(tmp_path, monkeypatch, without, where):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("WITHOUT", without)
    for command in ("train", "profile"):
        done = run(tmp_path, "-m", "mpitrain", command, EXAMPLES / "digits.toml", ranks=2)
        assert done.returncode == 2
        told = [line for line in done.stderr.splitlines() if "mpitrain" in line]
        assert len(told) == 1
        assert told[0].startswith("mpitrain: data.name = 'digits' needs scikit-learn (")
        assert f"): pip install scikit-learn (the extra 'data'){where}" in told[0]
        assert "Traceback" not in done.stderr


def test_a_picture_without_matplotlib_is_refused_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("WITHOUT", "0")
    done = run(tmp_path, "-m", "mpitrain", "schedules", "1f1b", "-o", ".")
    assert done.returncode == 2 and done.stderr.count("needs matplotlib") == 1
    assert "pip install matplotlib (the extra 'plot')" in done.stderr
    assert "Traceback" not in done.stderr


@needs_launcher
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "optim.moment=0.5"], "optim.moment: unknown key; did you mean 'momentum'?"),
        *(
            pytest.param(arguments, message, marks=pytest.mark.slow)
            for arguments, message in (
                (["--set", "train.batch_size=9999"], "train.batch_size = 9999 must be at most"),
                (["--set", "data.name=digit"], "data.name = 'digit': unknown value; did you mean"),
                (["--set", "parallel.algorithm=rign"], "no allreduce algorithm 'rign'; did you"),
                (
                    ["--set", "parallel.algorithm=parameter_server:servers=9"],
                    "servers=9 must lie in 1..3",
                ),
                (["--sett", "optim.lr=1"], "unrecognized arguments: --sett"),
            )
        ),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_once(tmp_path, arguments, message):
    done = train(tmp_path, EXAMPLES / "digits_mlp.toml", *arguments, ranks=3)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@needs_launcher
def test_a_loss_that_is_not_finite_is_reported_once(tmp_path):
    done = train(tmp_path, EXAMPLES / "digits_mlp.toml", "--set", "optim.lr=1e30", ranks=2)
    assert done.returncode == 1
    told = r"mpitrain: the loss or a gradient is not finite at step \d+ \(rank 0: the loss"
    assert len(re.findall(told, done.stderr)) == 1
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.slow
@needs_launcher
def test_a_report_that_cannot_be_written_ends_the_job_with_one_sentence(tmp_path):
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    done = train(tmp_path, EXAMPLES / "digits_mlp.toml", "--set", "run.dir=out", ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("mpitrain: out/metrics.jsonl cannot be written: Is a directory") == 1
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("lock*"))


@pytest.mark.slow
def test_two_jobs_do_not_share_a_folder(tmp_path):
    arguments = [EXAMPLES / "digits_mlp.toml", "--set", "run.dir=out"]
    arguments += ["--set", "checkpoint.every=1"]
    command = [sys.executable, "-m", "mpitrain", "train", *map(str, arguments)]
    first = subprocess.Popen(
        [*command, "--set", "train.epochs=100000"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not list(tmp_path.glob("out/checkpoints/step-*")):
            assert first.poll() is None
            time.sleep(0.05)
        second = train(tmp_path, *arguments)
        assert second.returncode == 2
        assert f"belongs to another job (process {first.pid} on " in second.stderr
        assert "Traceback" not in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    third = train(tmp_path, *arguments, "--resume", "--set", "train.steps=1")
    assert third.returncode == 0, third.stderr
    assert "resumed after step" in third.stdout


def test_what_does_not_end_by_itself_is_ended(tmp_path):
    """A rank inside of an Abort that does not return, its daemon, and the launcher above that."""
    for name in ("mpiexec.hydra", "daemon", "shell"):
        tmp_path.joinpath(name).symlink_to(shutil.which("sh"))
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import ctypes\nfrom collectives.failure.abort import expect_end\n"
        "expect_end(0.5, 1.0)\nctypes.PyDLL(None).sleep(60)"  # keeps the interpreter's lock
    )
    command = f"{sys.executable} {rank}"
    for name in ("daemon", "mpiexec.hydra", "shell"):  # outwards; each waits for its child
        script = tmp_path / f"{name}.sh"
        script.write_text(f"{command}\nsleep 60\n")
        command = f"{tmp_path / name} {script}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = subprocess.Popen(command.split(), env=environment, start_new_session=True)
    try:
        # All are there at first; in the end, who started the launcher goes on.
        for wanted in ({"shell", "mpiexec.hydra", "daemon", "rank.py"}, {"shell"}):
            deadline = time.monotonic() + 30
            while (found := living(f"{tmp_path}/")) != wanted and time.monotonic() < deadline:
                time.sleep(0.02)
            assert found == wanted
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def living(folder):
    """Names in ``folder`` with which processes were started or, if scripts, which they run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            names = [word.removeprefix(folder) for word in words if word.startswith(folder)]
            found.update(names[:1])
    return found
