"""The search for a learning rate: one process's in every layout, and nothing is written."""

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.commands.ranks import run
from mpitrain.config import Config
from mpitrain.start import start
from mpitrain.training import find_lr
from mpitrain.training.parts import UserObjects
from tests.mpi.mpitrain.layouts import RANKS, job, layouts, mlp

pytestmark = pytest.mark.at_most(5)


def find(comm, config, **limits):
    def make(comm, job, factor):
        return start(comm, job, UserObjects(schedule=factor))

    return find_lr.find(comm, config, make, **limits)


def test_a_layout_finds_what_one_process_does(comm):
    name = {2: "sequence, zero 3", 4: "context x pipe, zero 3"}.get(RANKS, "data")
    config = job("gpt", **layouts("gpt", RANKS)[name])
    limits = dict(least=1e-4, most=0.1, steps=6)
    found = find(comm, config, **limits)
    plain = Config(run=config.run, data=config.data, model=config.model, optim=config.optim)
    plain = replace(plain, train=replace(config.train, micro_batches=1))
    expected = find(MPI.COMM_SELF, plain, **limits)
    assert [one.lr for one in found.tried] == pytest.approx(np.geomspace(1e-4, 0.1, 6).tolist())
    losses, wanted = ([one.loss for one in each.tried] for each in (found, expected))
    np.testing.assert_allclose(losses, wanted, rtol=1e-10)
    assert found.why == "all steps were done"
    assert found.steepest == pytest.approx(expected.steepest)


@pytest.mark.quick_on(2)
def test_the_rates_are_those_of_the_job(comm):
    """A rate that does not grow is a run at that ``optim.lr``; scaled, as the job has it."""
    config = mlp("float64")
    config = replace(config, optim=replace(config.optim, reference_batch=50))
    near = find(comm, config, least=0.05, most=0.05 * (1 + 1e-12), steps=5)
    with start(comm, config) as trainer:
        records = [r for _, r in zip(range(5), trainer.run_epoch(0))]
    np.testing.assert_allclose([o.loss for o in near.tried], [r.loss for r in records], rtol=1e-8)


@pytest.mark.quick_on(2)
def test_it_ends_when_the_loss_diverges(comm):
    for least, most, steps in ((1e-3, 1e6, 60), (1e-300, 1e300, 8), (1e30, 1e38, 8)):
        found = find(comm, mlp(), least=least, most=most, steps=steps)
        diverged = ("the loss was above its least", "the loss or a gradient is not finite at step")
        assert found.why.startswith(diverged) and len(found.tried) < steps
        assert found.tried[0].lr == least
        assert steps == 8 or 1e-3 < found.steepest < 10.0


@pytest.mark.quick_on(2)
def test_the_command_prints_and_writes_nothing(comm, folder, capfd):
    comm.Barrier()
    own = folder / "run"
    told = ["find-lr", "digits", "--set", f"run.dir={own}", "--steps", "12", "--least", "1e-4"]
    assert run(told) == 0
    assert ("try optim.lr=" in capfd.readouterr().out) == (comm.rank == 0)
    assert not own.exists()
    assert run([*told, "--most", "1e-5"]) == 2
    assert ("find-lr tries 2 steps or more" in capfd.readouterr().err) == (comm.rank == 0)
