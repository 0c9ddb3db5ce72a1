"""The federated example from the command line: killed, resumed on other ranks, tested, reported."""

from importlib.util import find_spec

import pytest

from tests.launch.programs import ROOT, needs_launcher, run, scratch

pytestmark = [scratch, needs_launcher]
SECURE = find_spec("cryptography") is not None
SHORT = ["federated.rounds=4", "checkpoint.every=1", f"federated.secure={str(SECURE).lower()}"]


def start(folder, command, *words, ranks=2):
    sets = [part for text in (f"run.dir={folder}", *SHORT) for part in ("--set", text)]
    program = ("-m", "tests.drills.train", command, "federated")
    return run(folder, *program, *sets, *words, ranks=ranks, seconds=200)


def offline(*words):
    done = run(ROOT, "-m", "mpitrain", *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_example_trains_and_is_reported(tmp_path):
    few = ["federated.rounds=2", "federated.sample=8", "federated.take=6", "run.trace=true"]
    done = start(tmp_path, "train", *(part for text in few for part in ("--set", text)))
    assert done.returncode == 0, done.stderr
    assert "round 1: " in done.stdout and "all 2 steps are done" in done.stdout
    pytest.importorskip("matplotlib")
    offline("report", str(tmp_path))
    assert "after 2 steps" in (tmp_path / "report.html").read_text()
