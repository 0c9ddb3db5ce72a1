"""The trainer with its arrays on a device, by a stand-in for CuPy, beside the CPU's."""

import gc
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from collectives.execution.device_plan import DevicePlan, Gate
from mpitrain import nn
from mpitrain.config import ConfigError, Train
from mpitrain.device import choice
from mpitrain.training.parts import UserObjects
from tests.cases import each_check, mostly_slow
from tests.gpu import overlap, trainer
from tests.gpu.jobs import small, trained, trainer_on
from tests.mpi.mpitrain.layouts import RANKS, job, layouts
from tests.queued_cupy.counts import counts

pytestmark = [pytest.mark.at_most(5), pytest.mark.usefixtures("cupy")]

#: Host memory is summed in the node's memory in another order than messages are, from 3 ranks on;
#: and NumPy adds up the strided views of a ResNet in the order of memory, kernels row by row.
SAME_ORDER = RANKS < 3
QUICK = {2: ("interleaved",), 4: ("data x pipe",)}
QUICK_CHECKS = ("trainer.checkpoints", "overlap.gpt, staged")
BUDGET = Path(__file__).parents[2] / "golden" / "device_budget.json"


def expect_the_same(config, exact=SAME_ORDER, objects=UserObjects):
    right, found = (trained(device, config, objects=objects()) for device in ("cpu", "cuda"))
    if exact:
        assert found == right
    else:
        np.testing.assert_allclose(found[0], right[0], rtol=1e-5)
        assert found[1][0] == pytest.approx(right[1][0], rel=1e-5)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        # Context parallelism needs arrays in the host's memory.
        (name for name, how in layouts("gpt", RANKS).items() if "context" not in how),
        QUICK.get(RANKS, ()),
    ),
)
def test_layouts_have_the_cpus_losses(name):
    parallel = layouts("gpt", RANKS)[name]
    stages = parallel.get("pipe", 1) * parallel.get("chunks", 1)
    is_small = stages <= 4 and "partition" not in parallel
    expect_the_same(small(**parallel) if is_small else job("gpt", "float32", **parallel))


EVERY = (*trainer.CHECKS, *overlap.CHECKS)
CHECKS = each_check((one for one in EVERY if RANKS in one.ranks), QUICK_CHECKS.__contains__)


@pytest.mark.quick_on(2)
@pytest.mark.parametrize("check", CHECKS)
def test_each_check_of_the_trainer_on_a_gpu(check):
    check.run()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["convnet", "resnet"])
def test_images_in_rows_have_the_cpus_losses(model):
    expect_the_same(job(model, "float32", space=RANKS), exact=False)


@pytest.mark.quick_on(1, 2)
def test_batch_norm_and_dropout():
    def objects():
        first = {"flat": nn.Flatten(), "up": nn.Linear(64, 16)}
        layers = {"first": nn.Chain(first), "norm": nn.BatchNorm(16), "drop": nn.Dropout(0.3)}
        return UserObjects(layers=layers | {"last": nn.Linear(16, 10)})

    expect_the_same(job("mlp", "float32"), exact=False, objects=objects)


@pytest.mark.quick_on(1, 2)
def test_a_rank_without_a_gpu_is_all_ranks_error(monkeypatch):
    def look(local, compute="same"):
        return choice.RankGPUs("it sees no GPU") if MPI.COMM_WORLD.rank == RANKS - 1 else found

    found = choice.look(0)
    monkeypatch.setattr(choice, "look", look)
    refused = pytest.raises(ConfigError, match=rf"rank {RANKS - 1}: it sees no GPU; start every")
    with refused, trainer_on("cuda", small()):
        pass
    with trainer_on("auto", small()) as chosen:
        assert chosen.parts.device.name == "cpu"


@pytest.fixture
def held(monkeypatch):
    """How many gates each blocking collective has, at which the host stands."""
    found = []

    def wait(self):
        if sys._getframe(1).f_code.co_name != "arrived":  # there, the messages are over
            requests = (request for bound in self.rounds for request in bound.requests)
            found.append(sum(type(request) is Gate for request in requests))
        right(self)

    right = DevicePlan.Wait
    monkeypatch.setattr(DevicePlan, "Wait", wait)
    return found


#: Budgets of each number of ranks; few are quick.
BUDGETS = json.loads(BUDGET.read_text()).get(str(RANKS), {})


@pytest.mark.parametrize("name", mostly_slow(BUDGETS, ("zero 3", "sequence")))
def test_steps_keep_to_their_budget(held, name):
    """Kernels, waits and gates of a step: see ``tests/golden/device_budget.json``, docs/gpu.md.

    A smaller number found goes into the file: it may not grow again.
    """
    config = replace(small(**layouts("gpt", RANKS)[name]), train=Train(batch_size=8))
    with trainer_on("cuda", config) as one:
        steps = one.run_epoch(0)
        next(steps)
        gc.collect()  # memory of the trainer before waits when it goes
        counts.reset()
        held.clear()
        next(steps)
        own = counts.launched, counts.waited, sum(held)
        found = [MPI.COMM_WORLD.allreduce(number, MPI.MAX) for number in own]
        steps.close()
    assert counts.broadcast_matmuls.total() == 0, counts.broadcast_matmuls
    assert all(a <= b for a, b in zip(found, BUDGETS[name], strict=True)), found
    assert found[1] <= 1, counts.syncs
