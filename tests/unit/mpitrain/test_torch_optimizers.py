"""Optimisers of torch, and a program's own, that update each parameter by itself."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpitrain
from mpitrain.adapters.torch.functions.groups import grouped
from mpitrain.adapters.torch.functions.scheduler import TorchSchedule
from mpitrain.config import ConfigError
from tests.mpi.mpitrain.fits import loop, mse
from tests.zoo.mistakes import KINDS


class Signs(torch.optim.Optimizer):
    """A step of one's own, with a number outside of the groups."""

    def __init__(self, parameters, lr, times=2.0):
        super().__init__(parameters, {"lr": lr})
        self.times = times

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.move([p for p in group["params"] if p.grad is not None], group["lr"])

    def move(self, parameters, rate):
        for p in parameters:
            p -= rate * self.times * p.grad.sign()


class Norms(Signs):
    """Goes by one whole parameter at a time."""

    def move(self, parameters, rate):
        for p in parameters:
            p -= rate * p.grad / p.grad.norm()


class Narrow(Signs):
    """Keeps a mean in fewer digits."""

    def move(self, parameters, rate):
        for p in parameters:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.float32))
            p -= rate * mean.lerp_(p.grad.float(), 0.3)


def of_zoo(kind, way=0):
    """An optimiser with a mistake of tests/zoo, which is called Own."""
    program = SimpleNamespace(given={})
    KINDS[kind][way](program)
    return program.optimizer


TAKEN = {
    "step of its own": lambda p: Signs(p, lr=0.02),
    "whole parameters": lambda p: Norms(p, lr=0.02),
    "state of another type": lambda p: Narrow(p, lr=0.02),
    "state of other shapes": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def trained(folder, optimizer, *, resume=False, **given):
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)).double()
    trainer = mpitrain.Trainer(
        MPI.COMM_SELF, model=lambda: model().double(), optimizer=optimizer, batch_size=24,
        train_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        loss=mse, dir=str(folder), log_every=1000, **{"epochs": 2} | given,
    )  # fmt: skip
    with trainer:
        trainer.fit(resume=resume)
    return x, trainer.module


@pytest.mark.parametrize("kind", TAKEN)
def test_it_trains_as_torchs_loop_does_and_goes_on(tmp_path, kind):
    trained(tmp_path, TAKEN[kind], epochs=3)
    x, found = trained(tmp_path, TAKEN[kind], epochs=6, resume=True)
    wanted = model().double()
    loop(wanted, TAKEN[kind], [x] * 6, lambda module, x: mse(module(x), x.sum(1, keepdim=True)))
    for own, other in zip(found.parameters(), wanted.parameters(), strict=True):
        np.testing.assert_allclose(own.detach(), other.detach(), rtol=1e-9, atol=1e-12)


def hooked(parameters):
    made = torch.optim.SGD(parameters, lr=0.1)
    made.register_step_post_hook(lambda *given: None)
    return made


def stepped(parameters):
    made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    made.state[parameters[0]]["mean"] = torch.ones_like(parameters[0])
    return made


def unlike(parameters):
    first, second = parameters
    return torch.optim.Adam([{"params": [second]}, {"params": [first], "amsgrad": True}])


WAY_OUT = ".*DistributedDataParallel"


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (of_zoo("optimiser counts"), "a Own changes calls, which is lost" + WAY_OUT),
        (of_zoo("optimiser counts", 1), "a Own changes lr, which is lost" + WAY_OUT),
        (lambda p: torch.optim.LBFGS(p, lr=0.1), "LBFGS calls a closure" + WAY_OUT),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), "does not support dense" + WAY_OUT),
        (lambda p: 3, "gives a int, and an optimiser of torch is needed"),
        (hooked, "it has hooks on its steps, and nobody would call them"),
        (stepped, "it has taken steps and keeps mean of p0, and a new one keeps momentum_buffer"),
        (lambda p: torch.optim.SGD(p[1:]), "leaves out p0; give it all parameters"),
        (lambda p: torch.optim.SGD([*p, torch.nn.Parameter(torch.ones(3))]), "shape .3,. that is"),
        (unlike, "not exp_avg, exp_avg_sq, max_exp_avg_sq; turn momentum, amsgrad"),
    ],
)
def test_optimisers_that_cannot_be_are_refused_with_the_way_out(optimizer, why):
    given = {f"p{n}": torch.nn.Parameter(torch.ones(4, 3)) for n in range(2)}
    with pytest.raises(ConfigError, match=why):
        grouped(optimizer, given)
    assert all(torch.equal(p, torch.ones(4, 3)) for p in given.values())


def cyclic(optimizer):
    """A momentum that begins at 0."""
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2, max_momentum=0.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


LATE = {"optimizer": of_zoo("optimiser's late state")}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (LATE, "a Own begins to keep late in step 5, which n"),
        ({"optimizer": sgd, "schedule": cyclic}, "a SGD begins to keep momentum_buffer in step"),
    ],
)
@pytest.mark.parametrize("epochs", [5, 7])
def test_state_that_begins_late_is_an_error_of_all_ranks(tmp_path, given, why, epochs):
    with pytest.raises(ConfigError, match=why):
        trained(tmp_path, **given, epochs=epochs)


def test_parameters_of_a_group_are_updated_in_one_call():
    given = {f"p{n}": torch.nn.Parameter(torch.ones(4, 3)) for n in range(3)}
    first, *rest = given.values()
    options = [{"params": rest, "lr": 0.1}, {"params": [first], "lr": 0.2}]
    _, grouping = grouped(lambda p: torch.optim.SGD(options), given)
    assert grouping("p1") is grouping("p2") is not grouping("p0")


def test_a_code_that_has_the_momentum_takes_an_optimiser_without(tmp_path):
    codes = {"compress": {"codec": "dgc", "least": 0}}
    _, module = trained(tmp_path, lambda p: torch.optim.SGD(p, lr=0.02), **codes)
    assert not torch.equal(module[0].weight, model()[0].weight.double())
    fast = lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)  # noqa: E731
    for optimizer, keeps in ((fast, "momentum_buffer"), (torch.optim.Adam, "exp_avg, exp_avg_sq")):
        with pytest.raises(ConfigError, match=f"which keeps {keeps}; give an SGD without momentum"):
            trained(tmp_path, optimizer, **codes)


def test_a_rate_that_is_a_tensor_stays_as_it_is():
    rate, module = torch.tensor(0.01), torch.nn.Linear(2, 1)
    groups, _ = grouped(lambda p: torch.optim.AdamW(p, lr=rate), dict(module.named_parameters()))
    schedule = TorchSchedule(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4), groups)
    tables = [schedule.table(5).factors[:, 0].tolist() for _ in range(2)]
    assert tables[0] == tables[1] and tables[0][0] == pytest.approx(1.0)
    assert rate.item() == pytest.approx(0.01)
