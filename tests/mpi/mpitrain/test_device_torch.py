"""Torch modules on a device, by the stand-in for CuPy, beside the CPU's."""

from functools import partial

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpitrain
from mpitrain.config import ConfigError
from tests import queued_cupy
from tests.cases import each_check, mostly_slow
from tests.gpu import modules
from tests.gpu.jobs import everybody
from tests.gpu.modules import Samples, module, run
from tests.mpi.mpitrain.fits import RANKS, SEVERAL
from tests.zoo.parts import Of

pytestmark = pytest.mark.at_most(5)

SAME_ORDER = RANKS < 3


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    return queued_cupy.install(monkeypatch, queued_cupy.Machine(prompt=True))


def expect_the_cpus(**given):
    if not SAME_ORDER:  # in so many digits that the order of sums is no matter
        given = {"dtype": "float64"} | given
    right, found = (run(device, **given) for device in ("cpu", "cuda"))
    if SAME_ORDER:
        assert found[:2] == right[:2]
        assert all(torch.equal(found[2][name], value) for name, value in right[2].items())
    else:
        np.testing.assert_allclose(found[0], right[0], rtol=1e-5)
        np.testing.assert_allclose(found[1][0], right[1][0], rtol=1e-5)


SLOW = ("torch.data", "torch.zero 2", "torch.zero 3", "torch.optimizer")
CHECKS = [one for one in modules.CHECKS if RANKS in one.ranks]


@pytest.mark.quick_on(1, 2)
@pytest.mark.parametrize("check", each_check(CHECKS, lambda name: name not in SLOW))
def test_each_check_of_modules_on_a_gpu(check):
    check.run()


def averaging():
    """Batch norm that averages over all batches."""
    made = module()
    made[1].momentum = None
    return made


#: Samples, labels and outputs of several parts.
PARTS = SEVERAL | {"micro_batches": 2}
JOBS = {
    "bfloat16": {"run": {"compute": "bfloat16"}},
    "labels": {"classes": 4, "loss": torch.nn.CrossEntropyLoss(), "metrics": ["accuracy"]},
    "momentum": {"optimizer": partial(torch.optim.SGD, lr=0.01, momentum=0.9), "optim": {}},
    "our loss": {"loss": "mean_squared_error", "metrics": ["mae"]},
    "lamb": {"optim": {"name": "lamb", "lr": 0.01, "clip_norm": 0.5}},
    "averaging": {"model": averaging},
    "parts": PARTS | {"cuts": ()},
    "parts, zero 3": PARTS | {"cuts": (), "parallel": {"zero": 3}},
    "parts, pipe": PARTS | {"parallel": {"pipe": 2 - RANKS % 2}},
}


@pytest.mark.quick_on(1, 2)
@pytest.mark.parametrize("name", mostly_slow(JOBS, ("labels", "averaging", "parts, pipe")))
def test_jobs_have_the_cpus_numbers(name):
    expect_the_cpus(**JOBS[name])


@pytest.mark.slow
def test_a_run_goes_on_elsewhere(tmp_path):
    folder = MPI.COMM_WORLD.bcast(str(tmp_path))
    given = {
        "loss": torch.nn.functional.mse_loss, "batch_size": 16, "seed": 4,
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01), "model": lambda: module().double(),
        "train_data": Samples(),
    }  # fmt: skip
    ends = []
    for middle in ("cpu", "cuda"):
        for epochs, where in ((2, "cpu"), (4, middle), (6, "cpu")):
            own = {"device": where, "epochs": epochs, "dir": f"{folder}/{middle}"}
            with everybody() as comm, mpitrain.Trainer(comm, **own, **given) as trainer:
                trainer.fit(resume=epochs > 2)
                assert trainer.parts.device.name.startswith(where)
        ends.append(trainer.module.state_dict())
    for name, value in ends[0].items():
        if SAME_ORDER:
            assert torch.equal(ends[1][name], value), name
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-6)


def deaf():
    """Its outputs do not follow from its input."""
    bias = torch.nn.Parameter(torch.zeros(3))
    last = Of(lambda m, x: m.bias + torch.zeros(len(x), 3), bias=bias)
    return torch.nn.Sequential(torch.nn.Linear(12, 3), last)


@pytest.mark.quick_on(1, 2)
def test_what_the_cpu_alone_does_is_refused():
    with pytest.raises(ConfigError, match="the loss does not follow from its input, so that the"):
        run("cuda", test_data=None, metrics=None, model=deaf)
    with pytest.raises(ConfigError, match="a codec needs arrays in the host's memory"):
        run("cuda", compress={"codec": "int8"})
