"""Values that module and loss share beside outputs, or move without a gradient: as in torch."""

from copy import deepcopy
from math import gcd

import pytest

import mpitrain
from mpitrain.config import ConfigError
from mpitrain.metrics.records import Step
from tests.cases import slow_case
from tests.mpi.mpitrain.fits import RANKS, loop, mse, sgd, torch
from tests.zoo.parts import Of

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(5)).double()
DATA = torch.utils.data.TensorDataset(X, X.sin().sum(1, keepdim=True))
LAYOUTS = {
    "data": {},
    "micro-batches": {"micro_batches": 2},
    "recomputed": {"recompute": True},
    "zero 3": {"parallel": {"zero": 3}},
    "pipe": {"parallel": {"pipe": gcd(RANKS, 6)}, "micro_batches": 6},
}


class Follows(torch.nn.Module):
    """Adds a teacher, which follows the layer in each step, and steps that it counts."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.teacher = deepcopy(self.layer).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.steps += 1
                for slow, fast in zip(self.teacher.parameters(), self.layer.parameters()):
                    self.follow(slow, fast, x)
        return self.layer(x) + self.teacher(x) + 0.01 * self.steps

    def follow(self, slow, fast, x):
        slow.lerp_(fast, 0.1)


class Replaces(Follows):
    def follow(self, slow, fast, x):
        slow.data = 0.9 * slow.data + 0.1 * fast.data


class Begins(Follows):
    """The teacher follows samples, from the third step on, in a way that torch does not count."""

    def follow(self, slow, fast, x):
        if self.steps > 2 and slow.dim() > 1:
            slow.data.add_(x.mean())


def puts(there):
    """Hands on more than its outputs."""

    def forward(m, x):
        y = m.lin(x)
        there.update(scale=m.lin.weight.norm(), mean=y.square().mean())
        return y

    return Of(forward, lin=torch.nn.Linear(6, 8))


def scales(there):
    return Of(lambda m, x: m.lin(x) * there["scale"], lin=torch.nn.Linear(8, 1))


def model(middle, there):
    torch.manual_seed(0)
    there["net"] = torch.nn.Sequential(
        torch.nn.Linear(6, 8), middle(), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    return there["net"].double()


def penalised(there):
    def loss(outputs, labels):
        net = there["net"]
        every = sum(p.square().sum() for p in net.parameters() if p.requires_grad)
        return mse(outputs, labels) * (1 + net[3].weight.norm()) + 0.1 * every

    return loss


def losses_of_trainer(folder, net, loss, epochs=2, **more):
    found = []
    trainer = mpitrain.Trainer(
        model=net, loss=loss, epochs=epochs, optimizer=sgd,
        train_data=torch.utils.data.DataLoader(DATA, batch_size=12),
        run={"dir": str(folder)}, **more,
    )  # fmt: skip
    with trainer:
        trainer.fit(on_record=lambda r: found.append(r.loss) if isinstance(r, Step) else None)
        return found, trainer.module


def linear():
    return torch.nn.Linear(8, 8)


#: Each part in each layout, of which one part is quick.
CASES = [
    (pytest.param if (number + place) % 5 == 1 else slow_case)(middle, layout)
    for number, middle in enumerate((linear, Follows, Replaces))
    for place, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("middle", "layout"), CASES)
def test_losses_that_read_parameters_and_teachers_that_follow_are_as_in_torch(
    folder, middle, layout
):
    alone, there, more = {}, {}, LAYOUTS[layout]
    own, loss = model(middle, alone), penalised(alone)
    batches = [*torch.utils.data.DataLoader(DATA, batch_size=12)] * 3
    wanted = loop(own, sgd, batches, lambda net, some: loss(net(some[0]), some[1]))
    losses_of_trainer(folder, model(middle, there), penalised(there), **more)
    found, module = losses_of_trainer(folder, model(middle, there), penalised(there), 3, **more)
    assert found == pytest.approx(wanted, rel=1e-12)
    for name, value in own.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("zero", [0, slow_case(3)])
@pytest.mark.parametrize(
    ("net", "loss", "message"),
    [
        (lambda there: torch.nn.Sequential(puts(there), scales(there)), lambda there: mse,
         r"part1 follows from 0\.lin\.weight by another way than its inputs"),
        (lambda there: torch.nn.Sequential(puts(there), torch.nn.Linear(8, 1)),
         lambda there: lambda y, t: mse(y, t) + there.get("mean", 0),
         r"from 0\.lin\.\w+ by another way than outputs and labels.*as an output, with a row"),
        (lambda there: model(Begins, {}), lambda there: mse,
         r"part1 changes its teacher\.weight, which needs no gradient"),
    ],
)  # fmt: skip
def test_other_ways_than_inputs_and_outputs_are_told_on_all_ranks(folder, net, loss, message, zero):
    there = {}
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=message):
        losses_of_trainer(
            folder, net(there).double(), loss(there), epochs=8, parallel={"zero": zero}, shadow=0
        )
