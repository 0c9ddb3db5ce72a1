"""The command as a user starts it: processes of its own, a launcher, exit codes, its output."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.cases import mostly_slow, slow_case
from tests.launch.programs import MPITRAIN, ROOT, environment, needs_launcher, run
from tests.processes import command_lines, until

EXAMPLES = ROOT / "jobs" / "examples"


def train(folder, *arguments, ranks=None):
    return run(folder, "-m", "mpitrain", "train", *arguments, ranks=ranks)


@needs_launcher
def test_two_ranks_report_once(tmp_path):
    done = train(
        tmp_path, EXAMPLES / "digits_mlp.toml", "--set", "train.epochs=3",
        "--set", "parallel.algorithm=ring", ranks=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks, gradients by ring (asked for)") == 1
    assert "\x1b" not in done.stdout
    metrics = (tmp_path / "runs/digits_mlp/metrics.jsonl").read_text().splitlines()
    *records, summary = map(json.loads, metrics)
    assert [record["event"] for record in records].count("step") == 3 * 23
    assert (summary["event"], summary["ranks"], summary["algorithm"]) == ("summary", 2, "ring")
    assert 0 < summary["comm_share"] < 1


@needs_launcher
@pytest.mark.parametrize(
    "other", [("eval", "job.toml"), slow_case(("train", "other.toml", "--resume"))]
)
def test_command_lines_that_differ_are_refused(tmp_path, other):
    """Without it, the job of rank 0 counted, or the ranks of two commands waited for each other."""
    tmp_path.joinpath("job.toml").write_text("")
    done = train(tmp_path, "job.toml", *(":", "-n", "1", *MPITRAIN, *other), ranks=1)
    told = f"the command line is ['train', 'job.toml'] on rank 0 and {list(other)} on rank 1"
    assert done.returncode == 2 and done.stderr.count(told) == 1
    assert not tmp_path.joinpath("runs").exists()


#: Words that the job and the parser refuse; a loss that is not finite.
REFUSED = [
    ("--set optim.moment=0.5", 2, r"optim\.moment: unknown key; did you mean 'momentum'\?"),
    ("--sett optim.lr=1", 2, "unrecognized arguments: --sett"),
    ("--set optim.lr=1e30", 1,
     r"mpitrain: the loss or a gradient is not finite at step \d+ \(rank 0: the loss"),
]  # fmt: skip


@needs_launcher
@pytest.mark.parametrize(("words", "status", "told"), mostly_slow(REFUSED, REFUSED[:1]))
def test_a_job_that_cannot_go_on_says_so_once(tmp_path, words, status, told):
    done = train(tmp_path, EXAMPLES / "digits_mlp.toml", *words.split(), ranks=2)
    assert done.returncode == status
    assert len(re.findall(told, done.stderr)) == 1
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert (status == 2) == (not list(tmp_path.iterdir()))


def test_what_does_not_end_by_itself_is_ended(tmp_path):
    """A rank inside of an Abort that does not return, its daemon, and the launcher above that."""
    for name in ("mpiexec.hydra", "daemon", "shell"):
        tmp_path.joinpath(name).symlink_to(shutil.which("sh"))
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import ctypes, pathlib, time\nfrom collectives.failure.abort import expect_end\n"
        f"while not pathlib.Path('{tmp_path}', 'seen').exists(): time.sleep(0.02)\n"
        "expect_end(0.5, 1.0)\nctypes.PyDLL(None).sleep(60)"  # keeps the interpreter's lock
    )
    command = f"{sys.executable} {rank}"
    for name in ("daemon", "mpiexec.hydra", "shell"):  # outwards; each waits for its child
        script = tmp_path / f"{name}.sh"
        script.write_text(f"{command}\nsleep 60\n")
        command = f"{tmp_path / name} {script}"
    shell = subprocess.Popen(command.split(), env=environment(), start_new_session=True)
    try:
        # All are there at first; in the end, who started the launcher goes on.
        for wanted in ({"shell", "mpiexec.hydra", "daemon", "rank.py"}, {"shell"}):
            assert until(lambda wanted=wanted: living(f"{tmp_path}/") == wanted, 30)
            tmp_path.joinpath("seen").touch()
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def living(folder):
    """Names in ``folder`` with which processes were started or, if scripts, which they run."""
    named = [[word for word in words if word.startswith(folder)] for _, words in command_lines()]
    return {own[0].removeprefix(folder) for own in named if own}
