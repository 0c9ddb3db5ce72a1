"""Jobs with parameter servers from the command line: frozen, stopped, resumed."""

import os
import re
import signal

import pytest

from tests.launch import programs
from tests.launch.programs import ROOT, ended, needs_digits
from tests.processes import running, until

EXAMPLE = ROOT / "jobs" / "examples" / "server.toml"
pytestmark = needs_digits


def start(folder, *options, **variables):
    """``mpitrain train`` of the example, in ``folder``."""
    program = ("-m", "tests.drills.train", "train", EXAMPLE, "--set", f"run.dir={folder}/run")
    return programs.start(*program, *options, ranks=3, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_frozen_is_named_by_who_waits_for_it(tmp_path, rank):
    process = start(tmp_path, "--fault", f"freeze rank={rank} step=35", COLLECTIVES_TIMEOUT="15")
    _, errors = ended(process)
    assert process.returncode != 0
    assert f"rank {rank} on" in errors and "does not answer: it is stopped" in errors
    assert ("a message of worker rank" if rank == 0 else "the parameters of the servers") in errors
    # Open MPI's launcher leaves a stopped one behind.
    for number in running(f"run.dir={tmp_path}/run"):
        os.kill(number, signal.SIGKILL)


@pytest.mark.slow
def test_a_request_to_stop_is_obeyed_at_the_next_meeting(tmp_path):
    options = ["--set", "server.window=4", "--set", "train.epochs=40"]
    process = start(tmp_path, *options)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert until(lambda: metrics.exists() and '"step":20,' in metrics.read_text())
    found = running(f"run.dir={tmp_path}/run").items()
    os.kill(sorted([number for number, words in found if words[1:2] == ["-m"]])[1], signal.SIGUSR1)
    _, errors = ended(process)
    assert process.returncode == 75, errors
    step = int(re.search(r"stopped after step (\d+) of 920 \(signal SIGUSR1\)", errors)[1])
    assert step % 4 == 0 or step % 23 == 0
    again = start(tmp_path, *options, "--resume", "--set", f"train.steps={step + 3}")
    out, errors = ended(again)
    assert again.returncode == 0 and f"resumed after step {step}" in out, errors
