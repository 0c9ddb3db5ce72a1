"""A step on a device, on one rank: how many kernels it takes, and that nothing in it waits."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from mpitrain.config import Optim, Train
from tests.cases import each_check
from tests.gpu import kernels, layers, trainer
from tests.gpu.jobs import small, trained, trainer_on
from tests.queued_cupy.counts import counts

BUDGET = Path(__file__).parents[2] / "golden" / "device_budget.json"


pytestmark = pytest.mark.usefixtures("cupy")


@pytest.mark.parametrize(("name", "zero"), [("data", 0), ("zero 2", 2)])
def test_steps_keep_to_their_budget(name, zero):
    """A smaller number found goes into the file: it may not grow again."""
    kernels, waits, _ = json.loads(BUDGET.read_text())["1"][name]
    config = replace(small(zero=zero), train=Train(batch_size=8))
    with trainer_on("cuda", config) as one:
        steps = one.run_epoch(0)
        next(steps)
        counts.reset()
        next(steps)
        assert (counts.launched <= kernels, counts.waited <= waits) == (True, True), counts.syncs
        assert not counts.broadcast_matmuls
        steps.close()


def test_losses_are_the_cpus():
    config = replace(small(), optim=Optim(name="lamb", lr=1e-3, weight_decay=0.1, clip_norm=0.5))
    assert trained("cuda", config, 2) == trained("cpu", config, 2)


#: On 2 ranks, tests/mpi/mpitrain/test_device_layouts.py has the others.
QUICK = ("trainer.data", "trainer.float16")


EVERY = (*kernels.CHECKS, *layers.CHECKS, *trainer.CHECKS)
CHECKS = each_check(
    (one for one in EVERY if 1 in one.ranks),
    lambda name: name in QUICK or not name.startswith("trainer."),
)


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_of_one_rank(check):
    check.run()
