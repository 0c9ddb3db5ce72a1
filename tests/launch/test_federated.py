"""The federated example from the command line: killed, resumed on other ranks, tested, reported."""

from importlib.util import find_spec

import numpy as np
import pytest

from mpitrain.checkpoint import CheckpointReader
from mpitrain.metrics import Epoch, Round, Step, read_records
from tests.launch.programs import ROOT, needs_launcher, run, scratch

pytestmark = [scratch, needs_launcher]
SECURE = find_spec("cryptography") is not None
SHORT = ["federated.rounds=4", "checkpoint.every=1", f"federated.secure={str(SECURE).lower()}"]


def start(folder, command, *words, ranks=2):
    sets = [part for text in (f"run.dir={folder}", *SHORT) for part in ("--set", text)]
    program = ("-m", "tests.drills.train", command, "federated")
    return run(folder, *program, *sets, *words, ranks=ranks, seconds=200)


def weights(folder):
    checkpoint = CheckpointReader(folder / "checkpoints" / "step-00000004")
    return {
        (section, name): checkpoint.tensor(section, name)
        for section in ("parameters", "velocity")
        for name in checkpoint.manifest.shapes
    }


def offline(*words):
    done = run(ROOT, "-m", "mpitrain", *words)
    assert done.returncode == 0, done.stderr


def test_the_example_trains_and_is_reported(tmp_path):
    few = ["federated.rounds=2", "federated.sample=8", "federated.take=6", "run.trace=true"]
    done = start(tmp_path, "train", *(part for text in few for part in ("--set", text)))
    assert done.returncode == 0, done.stderr
    assert "round 1: " in done.stdout and "all 2 steps are done" in done.stdout
    pytest.importorskip("matplotlib")
    offline("report", str(tmp_path))
    assert "after 2 steps" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_by_bit_on_other_ranks(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    done = start(whole, "train")
    assert done.returncode == 0, done.stderr
    assert "round 1: " in done.stdout
    assert start(killed, "train", "--fault", "kill rank=1 step=3", ranks=3).returncode != 0
    resumed = start(killed, "train", "--resume", ranks=1)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step " in resumed.stdout
    expected, found = weights(whole), weights(killed)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    log = read_records(killed / "metrics.jsonl")
    for kind in (Round, Step):
        assert [record.step for record in log.of(kind)] == [1, 2, 3, 4]
    assert log.of(Epoch)[-1].metrics == read_records(whole / "metrics.jsonl").of(Epoch)[-1].metrics
    tested = start(whole, "eval", ranks=3)
    assert tested.returncode == 0, tested.stderr
    assert "test accuracy " in tested.stdout
    offline("export", str(whole), str(tmp_path / "out.safetensors"))
