"""Torch modules on a device, by the stand-in for CuPy, beside the CPU's."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpitrain
from collectives import Communicator
from mpitrain.config import ConfigError
from tests import queued_cupy
from tests.cases import each_check, slow_case
from tests.gpu import modules
from tests.gpu.modules import Samples, module, run
from tests.mpi.mpitrain.fits import SEVERAL, Sentences
from tests.zoo.parts import Of

pytestmark = pytest.mark.at_most(5)

RANKS = MPI.COMM_WORLD.size
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


@pytest.mark.quick_on(1, 2)
@pytest.mark.parametrize(
    "change",
    [
        slow_case({"run": {"compute": "bfloat16"}}),
        {"classes": 4, "loss": torch.nn.CrossEntropyLoss(), "metrics": ["accuracy"]},
        *(
            slow_case(change)
            for change in (
                {"optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), "optim": {}},
                {"loss": "mean_squared_error", "metrics": ["mae"]},
                {"optim": {"name": "lamb", "lr": 0.01, "clip_norm": 0.5}},
            )
        ),
    ],
    ids=["bfloat16", "labels", "momentum", "our loss", "lamb"],
)
def test_jobs_have_the_cpus_numbers(change):
    expect_the_cpus(**change)


@pytest.mark.quick_on(1, 2)
@pytest.mark.parametrize("parallel", [*(slow_case(how) for how in ({}, {"zero": 3})), {"pipe": 2}])
def test_samples_labels_and_outputs_of_several_parts(parallel):
    if RANKS % parallel.get("pipe", 1):
        pytest.skip("no such layout")
    data = Sentences(48, 1)
    cuts = {"cuts": SEVERAL["cuts"]} if parallel.get("pipe") else {}
    expect_the_cpus(
        **(SEVERAL | {"cuts": ()} | cuts), train_data=data, test_data=data, parallel=parallel,
        micro_batches=2,
    )  # fmt: skip


@pytest.mark.quick_on(1, 2)
def test_batch_norm_that_averages_over_all_batches():
    def averaging():
        made = module()
        made[1].momentum = None
        return made

    expect_the_cpus(model=averaging)


@pytest.mark.slow
def test_a_run_goes_on_elsewhere(tmp_path):
    folder = MPI.COMM_WORLD.bcast(str(tmp_path))
    given = {
        "loss": torch.nn.functional.mse_loss, "batch_size": 16, "seed": 4,
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01), "model": lambda: module().double(),
    }  # fmt: skip
    ends = []
    for part in ("right", "moved"):
        for epochs in (2, 4, 6):
            where = "cuda" if part == "moved" and epochs == 4 else "cpu"
            with (
                Communicator(MPI.COMM_WORLD, device="staged") as comm,
                mpitrain.Trainer(
                    comm, device=where, train_data=Samples(), epochs=epochs,
                    dir=f"{folder}/{part}", **given,
                ) as trainer,
            ):  # fmt: skip
                trainer.fit(resume=epochs > 2)
                assert trainer.parts.device.name.startswith(where)
                ends.append({k: v.clone() for k, v in trainer.module.state_dict().items()})
    for name, value in ends[2].items():
        if SAME_ORDER:
            assert torch.equal(ends[5][name], value), name
        torch.testing.assert_close(ends[5][name], value, rtol=1e-4, atol=1e-6)


def deaf():
    """Its outputs do not follow from its input."""
    bias = torch.nn.Parameter(torch.zeros(3))
    return torch.nn.Sequential(
        torch.nn.Linear(12, 3), Of(lambda m, x: m.bias + torch.zeros(len(x), 3), bias=bias)
    )


@pytest.mark.quick_on(1, 2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": deaf},
            "the loss does not follow from its input, so that the layers before it stay",
        ),
        ({"compress": {"codec": "int8"}}, "a codec needs arrays in the host's memory"),
    ],
)
def test_what_the_cpu_alone_does_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        run("cuda", **{"test_data": None, "metrics": None} | change)
