"""Runs that are killed, and go on as if they had not been."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from mpitrain.checkpoint.reader import CheckpointReader
from tests.launch import programs
from tests.launch.programs import ended, scratch
from tests.processes import running

pytestmark = scratch
#: Drawn moments at which a run is killed, of each kind.
SWEEPS = int(os.environ.get("SWEEPS", "3"))

JOB = """
[run]
seed = 5
log_every = 1000
[data]
name = "text"
path = "jobs/examples/license.txt"
context = 16
[model]
kind = "gpt"
layers = 4
heads = 2
width = 32
[optim]
name = "adamw"
lr = 1e-3
reference_batch = 0
[train]
epochs = 3
steps = 60
batch_size = 16
micro_batches = 2
[checkpoint]
every = 3
"""
MIXTURE = ["model.experts=3", "model.capacity=1.0", "parallel.pipe=2", "parallel.experts=2"]
STALE = [*MIXTURE, "parallel.schedule=asynchronous", "parallel.window=4"]
#: Keys by the name of a layout, which begins with its ranks unless there are 4.
LAYOUTS = {
    "data": [],
    "pipe": ["parallel.pipe=2"],
    "tensor, zero 2": ["parallel.tensor=2", "parallel.zero=2"],
    "data x pipe, zero 3": ["parallel.pipe=2", "parallel.zero=3"],
    "experts x v, zero 3": [*MIXTURE, "parallel.schedule=zb_v", "parallel.zero=3"],
    "experts, asynchronous": STALE,
    "8: experts x context, asynchronous": [*STALE, "parallel.context=2"],
    "data, reading ahead": ["data.workers=2"],
    "codes": ["compress.codec=topk:keep=0.1"],
    "local": ["sync.kind=local", "sync.period=4", "sync.outer=nesterov"],
    "delayed": ["sync.kind=delayed", "sync.period=2", "sync.delay=3"],
    "servers": ["server.ranks=1", "server.bound=0"],
    "clients": [
        "model.layers=1",
        "model.width=8",
        "train.steps=0",
        "train.epochs=1",
        "federated.clients=40",
        "federated.rounds=60",
        "federated.sample=4",
        "federated.dropout=0.1",
        "federated.server=adam",
        "federated.server_lr=0.02",
        "federated.bits=8",
    ],
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The final parameters of a layout's run that nobody killed."""
    known = {}

    def run(layout):
        if layout not in known:
            folder = tmp_path_factory.mktemp("whole")
            process = start(folder, layout)
            _, errors = ended(process, 120)
            assert process.returncode == 0, errors
            known[layout] = parameters(folder)
        return known[layout]

    return run


def number_of_ranks(layout):
    return int(layout[0]) if layout[0].isdigit() else 4


def start(folder, layout, *options, ranks=0):
    job = folder / "job.toml"
    job.write_text(JOB)
    overrides = [f"run.dir={folder}/run", *LAYOUTS[layout]]
    sets = [part for override in overrides for part in ("--set", override)]
    return programs.start(
        "-m", "mpitrain", "train", job, *sets, *options, ranks=ranks or number_of_ranks(layout)
    )


def ranks_of(folder):
    """Process numbers of the ranks that run this folder's job, by reading /proc.

    Neither session nor parent tells: MPICH's launcher puts its ranks into sessions of their own.
    """
    # The launcher has the same words behind its own, or in a script's place.
    found = {
        number
        for number, words in running(str(folder / "job.toml")).items()
        if words[1:3] == ["-m", "mpitrain"]
    }
    # Processes that read ahead are their children, with the same words.
    return sorted(number for number in found if parent(number) not in found)


def parent(number):
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    return int(fields[1])


def parameters(folder):
    newest = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    checkpoint = CheckpointReader(newest)
    checkpoint.verify()
    assert checkpoint.manifest.progress.step == 60
    return {name: checkpoint.tensor("parameters", name) for name in checkpoint.names}


def kill_somewhere(folder, layout, rng):
    """Start, kill one rank at a random time, and wait for the end."""
    process = start(folder, layout)
    metrics = folder / "run" / "metrics.jsonl"
    target = rng.randrange(1, 45)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count('"event":"step"') >= target:
            break
        time.sleep(0.002)
    time.sleep(rng.random() * 0.01)
    ranks = ranks_of(folder)
    assert len(ranks) == number_of_ranks(layout), "the run ended before it was killed"
    os.kill(rng.choice(ranks), signal.SIGKILL)
    ended(process, 60)
    assert process.returncode != 0
    deadline = time.monotonic() + 60
    while (left := running(str(folder / "job.toml"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, "processes outlive the job"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SWEEPS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(
    tmp_path, uninterrupted, layout, seed
):
    kill_somewhere(tmp_path, layout, random.Random(seed))
    process = start(tmp_path, layout, "--resume")
    _, errors = ended(process, 120)
    assert process.returncode == 0, errors
    found, expected = parameters(tmp_path), uninterrupted(layout)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.slow
def test_it_goes_on_in_another_layout_with_fewer_ranks(tmp_path, uninterrupted):
    kill_somewhere(tmp_path, "data x pipe, zero 3", random.Random(3))
    process = start(tmp_path, "pipe", "--resume", ranks=2)
    _, errors = ended(process, 120)
    assert process.returncode == 0, errors
    found, expected = parameters(tmp_path), uninterrupted("pipe")
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=2e-3)
