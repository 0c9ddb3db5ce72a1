"""Torch modules as layers of the trainer."""

from itertools import islice

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.config import Config, ConfigError
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.start import start
from mpitrain.training.parts import UserObjects
from tests.cases import slow_case
from tests.mpi.mpitrain.fits import OPTIMIZERS, Waves, loop, made, regular, torch, torchs_own
from tests.mpi.mpitrain.layouts import RANKS, changed
from tests.zoo.parts import Of

from mpitrain.adapters.torch import layers, load_into  # isort: skip  # behind what skips without torch


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.BatchNorm1d(32)),
        torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.ReLU()),
        torch.nn.Linear(32, 10),
    ).double()


def job(**parallel):
    return changed(
        Config(), dtype="float64", data={"name": "digits"}, optim={"lr": 0.1}, parallel=parallel,
        train={"epochs": 1, "batch_size": 48},
    )  # fmt: skip


def by_torch(trainer, whole):
    """Losses of torch in one process in 20 steps."""
    data, batches = trainer.parts.data.train, islice(trainer.parts.sampler.batches(0), 20)

    def loss(module, batch):
        some = data[batch]
        scores = module(torch.from_numpy(some.inputs))
        return torch.nn.functional.cross_entropy(scores, torch.from_numpy(some.labels))

    return loop(whole, lambda p: torch.optim.SGD(p, lr=0.1 * 48 / 64, momentum=0.9), batches, loss)


def tables(value):
    """A table that is no parameter, in the module's own type."""
    return Of(lambda m, x: x.flatten(1) + m.table, table=torch.linspace(0, value, 64))


@pytest.mark.quick_on(2)
@pytest.mark.parametrize(
    "parallel", [{"pipe": RANKS}, slow_case({"recompute": True}), slow_case({"zero": 3})], ids=str
)
def test_layers_of_torch_within_others(comm, parallel):
    """In a chain and a residual, beside layers that are not torch's, they are torch's as well."""

    def mixed(whole):
        flat, first, second, last = layers(whole).values()
        return {
            "a": nn.Chain({"flat": flat, "x": nn.Chain({"first": first})}),
            "b": nn.Residual({"second": second}),
            "c": nn.Bias(32),
            "last": last,
        }

    class Adding(torch.nn.Sequential):
        def forward(self, x):
            flat, first, second, last = self
            x = first(flat(x))
            return last(x + second(x) + self.bias)

    if RANKS > 4:
        pytest.skip("the model has 4 layers")
    mine = module()
    with start(comm, job(**parallel), objects=UserObjects(layers=mixed(mine))) as trainer:
        found = [record.loss for record in islice(trainer.run_epoch(0), 20)]
        load_into(mine, trainer.parts)
        told = r"layer a has trained '1\.0\..*', and the module \(Lin"
        with pytest.raises(ValueError, match=told):
            load_into(torch.nn.Linear(2, 2), trainer.parts)
    one = Adding(*module()).double()
    one.bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.float64))
    np.testing.assert_allclose(found, by_torch(trainer, one), rtol=1e-10)
    wanted = {name: one.state_dict()[name] for name in mine.state_dict()}
    torch.testing.assert_close(dict(mine.state_dict()), wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.skipif(RANKS == 1, reason="needs a rank that differs")
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_that_bring_other_values_are_refused(comm, zero):
    for other_table, other_weight, told in (
        (0.5 * (comm.rank == 1), 0, r"rank 1 against .* in part0\.table"),
        (0, comm.rank, r"part1\.weight"),
    ):
        torch.manual_seed(other_weight)
        own = torch.nn.Sequential(tables(0.5 + other_table), torch.nn.Linear(64, 10)).double()
        with pytest.raises(ReplicaMismatch, match=told):
            start(comm, job(zero=zero), objects=UserObjects(layers=layers(own)))


class Physics(torch.nn.Module):
    """Gives u and its slope by the input, in a form that needs putting together again."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16)
        self.down = torch.nn.Linear(16, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.down(self.norm(self.up(x)).tanh())
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return {"u": (u, None), "slope": slope}


def physics(outputs, y):
    u, nothing = outputs["u"]
    assert nothing is None
    return torch.nn.functional.mse_loss(u, y) + 0.1 * outputs["slope"].square().mean()


def test_gradients_of_gradients_over_the_batch_of_all_replicas(folder):
    make, by, metrics = lambda: Physics().double(), OPTIMIZERS["SGD"], {"own": physics}
    with made(folder, model=make, optimizer=by, loss=physics, metrics=metrics) as trainer:
        trainer.fit()
        found = trainer.module.state_dict()
        wanted, _ = torchs_own(trainer, by, None, make=make, loss=physics)
    torch.testing.assert_close(found, dict(wanted.state_dict()), rtol=1e-9, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_the_shadow_leaves_out_what_torch_cannot_take_on_one_rank(folder):
    """Two samples in the last batch: one of a rank, which batch norm refuses, or none."""
    given = {"train_data": Waves(4 * RANKS + 2, 1), "test_data": None, "metrics": None}
    with made(folder, model=regular, batch_size=4 * RANKS, shadow=8, **given) as trainer:
        assert trainer.fit() == []


def of_line(f):
    return lambda: Of(lambda m, x: f(x, m.lin(x)), lin=torch.nn.Linear(6, 1).double())


MIXES = of_line(lambda x, y: y - x.mean(0).sum())
#: Goes by a size that no rank has by itself.
SIZED = of_line(lambda x, y: y * (1 + (len(x) > 4)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("model", "each", "step"), [(MIXES, 2, 1), (MIXES, 1, 1), (SIZED, 4, 2)])
def test_a_few_samples_of_a_rank_show_what_goes_by_the_whole_batch(folder, model, each, step):
    """Also in micro-batches of one sample, and where a rank has none."""
    given = {"train_data": Waves(8 * RANKS, 1), "test_data": None, "metrics": None}
    given |= {"batch_size": each * RANKS, "micro_batches": 2, "shadow": 8}
    with pytest.raises(ConfigError, match=rf"step {step}: the loss is .*: it mixes samples"):
        made(folder, model=model, **given).fit()


@pytest.mark.quick_on(3)
@pytest.mark.skipif(RANKS != 3, reason="three stages of two chunks")
@pytest.mark.parametrize("zero", [2, 3])
def test_stages_use_what_they_share_in_other_numbers_of_passes(folder, alone, zero):
    """In both chunks of the first stage, and in one of the last."""

    def model():
        shared, (a, b, c) = torch.nn.Linear(6, 6), (torch.nn.Linear(6, 6) for _ in range(3))
        return torch.nn.Sequential(shared, a, b, shared, c, shared, torch.nn.Linear(6, 1)).double()

    layout = {"pipe": 3, "schedule": "interleaved", "chunks": 2, "zero": zero}
    given = {"model": model, "epochs": 1, "micro_batches": 3}
    with made(folder, **given, parallel=layout) as trainer:
        (found,) = trainer.fit()
    (wanted,), _ = alone(**given)
    assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-11)


@pytest.mark.mpi(min_size=2)
def test_workers_whose_last_stage_has_no_parameters_keep_averages(folder):
    given = {"parallel": {"pipe": 2}, "sync": {"kind": "local", "period": 2}, "average": 0.9}
    given["model"] = lambda: torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Tanh())
    if RANKS % 2 == 0:
        with made(folder, **given) as trainer:
            assert np.isfinite(trainer.fit()[-1].test_loss)


@pytest.mark.quick_on(3)
@pytest.mark.skipif(RANKS != 3, reason="two replicas of a stage, and one of the other")
def test_an_update_without_samples_is_a_part_of_a_step_that_has_some(folder):
    """The last batch has one sample, and the stage of one replica two updates."""
    layout = {"replicas": [2, 1], "schedule": "asynchronous"}
    with made(folder, train_data=Waves(25, 1), batch_size=8, parallel=layout, epochs=1) as trainer:
        assert len(trainer.fit()) == 1
