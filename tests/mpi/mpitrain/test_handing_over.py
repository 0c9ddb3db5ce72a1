"""From the trainer into a loop of torch and back: values, optimiser state, rates, files."""

import numpy as np
import pytest

from mpitrain.config import ConfigError
from tests.cases import mostly_slow
from tests.mpi.mpitrain.fits import OPTIMIZERS, PARALLEL, assert_alike, loop, made, mse, net, torch

pytestmark = pytest.mark.at_most(4)
in_groups = OPTIMIZERS["groups"]
each_optimizer = pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, ["groups"]))


def samples_of(trainer, epochs):
    """Batches of a trainer's epochs."""
    data, sampler = trainer.parts.data.train, trainer.parts.sampler
    every = ((epoch, batch) for epoch in epochs for batch in sampler.batches(epoch))
    return [data.in_epoch(epoch)[batch] for epoch, batch in every]


def of_waves(module, batch):
    return mse(module(torch.from_numpy(batch.inputs)), torch.from_numpy(batch.labels))


@each_optimizer
def test_a_loop_of_torch_goes_on_where_the_trainer_ended(folder, name):
    asked = {"model": lambda: net().double(), "optimizer": OPTIMIZERS[name], "parallel": PARALLEL}
    with made(folder / "long", **asked, epochs=3) as trainer:
        trainer.fit()
    expected = trainer.module
    with made(folder / "short", **asked, epochs=2) as trainer:
        trainer.fit()
        optimizer = trainer.torch_optimizer()
        loop(trainer.module, lambda p: optimizer, samples_of(trainer, [2]), of_waves)
    assert_alike(trainer.module, expected)


def begun(factory):
    """A module and its optimiser after five steps of a loop of torch."""
    torch.manual_seed(3)
    module = net().double()
    optimizer = factory(list(module.parameters()))
    batches = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    loop(module, lambda p: optimizer, batches, lambda module, x: module(x).square().mean())
    return module, optimizer


@each_optimizer
def test_the_trainer_goes_on_where_a_loop_of_torch_ended(folder, name):
    """Also when it was stopped and goes on with its own checkpoint."""
    for steps in (4, 10):
        module, optimizer = begun(OPTIMIZERS[name])
        asked = {"model": module, "optimizer": lambda p, own=optimizer: own, "steps": steps}
        with made(folder, parallel=PARALLEL, **asked) as trainer:
            trainer.fit(resume=True)
    expected, own = begun(OPTIMIZERS[name])
    loop(expected, lambda p: own, samples_of(trainer, [0, 1]), of_waves)
    assert_alike(module, expected)


def test_rates_are_those_of_the_next_step(folder):
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)  # noqa: E731
    with made(folder, optimizer=in_groups, schedule=halving, steps=9) as trainer:
        trainer.fit()
        rates = [group["lr"] for group in trainer.torch_optimizer().param_groups]
    np.testing.assert_allclose(rates, [3e-3 / 4, 3e-3 / 4, 1e-4 / 4])


def test_a_distributed_checkpoint_of_torch_there_and_back(folder, comm):
    """Written by the trainer's program, read as a script with torch's own calls reads it."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    with made(folder, optimizer=in_groups, epochs=1) as trainer:
        trainer.fit()
        optimizer = trainer.torch_optimizer()
    if comm.rank == 0:
        values, state = get_state_dict(trainer.module, optimizer)
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder / "dcp", no_dist=True)
    comm.Barrier()
    module = net().double()
    read = in_groups(list(module.parameters()))
    values, state = get_state_dict(module, read)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder / "dcp", no_dist=True)
    set_state_dict(module, read, model_state_dict=values, optim_state_dict=state)
    for mine, wanted in zip(module.parameters(), trainer.module.parameters(), strict=True):
        assert torch.equal(mine, wanted)
        for name, value in optimizer.state[wanted].items():
            assert torch.equal(read.state[mine][name], value)


def test_what_cannot_be_handed_over_is_refused_on_all_ranks(folder):
    with made(folder) as trainer, pytest.raises(ConfigError, match="no optimiser of torch"):
        trainer.torch_optimizer()
    averaged = made(folder, optimizer=in_groups, average=0.9)
    with averaged as trainer, pytest.raises(ConfigError, match="the module has averages"):
        trainer.torch_optimizer()
