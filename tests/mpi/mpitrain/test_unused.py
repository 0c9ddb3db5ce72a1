"""Parameters that the loss does not follow from stay as torch leaves them."""

from collections import Counter

import numpy as np
import pytest

from mpitrain.config import ConfigError
from tests.cases import mostly_slow
from tests.mpi.mpitrain.fits import PARALLEL, RANKS, Waves, assert_interrupted_alike, made, torch
from tests.zoo.parts import Of

nn, mse = torch.nn, torch.nn.functional.mse_loss
pytestmark = pytest.mark.at_most(5)


class Turns(torch.utils.data.IterableDataset):
    """Points of a surface in a fixed order; special ones are in each second batch of 24."""

    def __init__(self, samples=144, seed=1, special=(30, 31, 80, 120)):
        self.samples, self.seed, self.special = samples, seed, special

    def __len__(self):
        return self.samples

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed)
        for number in range(self.samples):
            x = torch.rand(6, generator=draw).double() * 4 - 2
            special = torch.tensor([float(number in self.special)]).double()
            yield (x, special), (torch.sin(x[0]) * x[1] + x[2])[None]


def of_one(outputs, labels):
    return mse(outputs["y"], labels)


class Enter(nn.Module):
    """Values, what the loss leaves out, and whether a sample is special: branches pass them on."""

    def __init__(self):
        super().__init__()
        self.linear, self.aside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given):
        x, special = given
        x = torch.tanh(self.linear(x))
        return x, self.aside(x), special


class Branch(nn.Module):
    """Used always, never, aside, so that the loss leaves its values out, or for special samples."""

    def __init__(self, use):
        super().__init__()
        self.use, self.linear = use, nn.Linear(6, 6)

    def forward(self, given):
        x, aside, special = given
        if self.use == "never" or (self.use == "special" and not bool((special > 0).any())):
            return given
        y = torch.tanh(self.linear(x))
        if self.use == "aside":
            return x, aside + y, special
        return x + (special * y if self.use == "special" else y), aside, special


def leave():
    return Of(lambda m, x: {"y": m.linear(x[0]), "aside": x[1]}, linear=nn.Linear(6, 1))


class Whole(nn.Module):
    """All parts as one, which can be cut where no value decides."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, special):
        return self.parts((x, special))


def in_turn():
    uses = ("always", "aside", "never", "special")
    return nn.Sequential(Enter(), *map(Branch, uses), leave()).double()


def whole():
    parts = nn.Sequential(Enter(), *map(Branch, ("always", "aside", "never")), leave())
    return Whole(parts).double()


CUT = {"model": whole, "cuts": ["parts.0", "parts.1", "parts.2"]}
OWN = {"optim": {"name": "adamw", "lr": 0.01, "weight_decay": 0.3, "reference_batch": 0}}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)


def given(**changed):
    usual = {"model": in_turn, "loss": of_one, "metrics": None, "test_data": None, "epochs": 1}
    usual |= {} if "optim" in changed else {"optimizer": adamw}
    return usual | {"train_data": Turns(), "batch_size": 24} | changed


def twin(model, data, size):
    """The module that torch has trained, and in how many steps it had no use for a parameter."""
    torch.manual_seed(7)
    module, left_out = model(), Counter()
    optimizer = adamw(module.parameters())
    for (x, special), y in torch.utils.data.DataLoader(data, size):
        optimizer.zero_grad()
        of_one(module(x, special) if model is whole else module((x, special)), y).backward()
        left_out.update(name for name, one in module.named_parameters() if one.grad is None)
        optimizer.step()
    return module, left_out


def check(comm, folder, **changed):
    """The trainer does as torch's loop, and all ranks have the same; collective."""
    own = given(**changed)
    with made(folder, **own) as trainer:
        trainer.fit()
        left_out = dict(trainer.parts.updater.left_out)
    found = trainer.module.state_dict()
    every = comm.allgather((left_out, np.concatenate([v.numpy().ravel() for v in found.values()])))
    assert all(np.array_equal(every[0][1], other) for _, other in every), "ranks differ"
    module, steps = twin(own["model"], own["train_data"], own["batch_size"])
    left_out = {name: count for part, _ in every for name, count in part.items()}
    assert left_out == {trainer.parts.objects.names[name]: count for name, count in steps.items()}
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_what_is_used_now_and_then_is_torchs(comm, folder):
    """Used on one rank is used; the others' counts of steps go on without it."""
    check(comm, folder, parallel={"zero": 1})


def test_what_crosses_a_cut_and_is_not_used(comm, folder):
    check(comm, folder, **CUT, parallel=PARALLEL | {"checksums": RANKS == 3})


HOW = {
    "data": {},
    "zero 2": {"parallel": {"zero": 2}},
    "workers": {"sync": {"kind": "local", "period": 2, "agree": 3}},
}


@pytest.mark.parametrize("how", mostly_slow(HOW, ["data"]))
def test_an_interrupted_run_counts_on(folder, how):
    """Each worker by itself, if they are told late."""
    test = {"test_data": Turns(30, 2), "epochs": 2, "checkpoint": {"every": 3}}
    assert_interrupted_alike(folder, given(**test, **HOW[how]), {})


def test_batches_of_fewer_samples_than_ranks(comm, folder):
    """An empty share uses nothing."""
    check(comm, folder, train_data=Turns(6, special=(3,)), batch_size=2)


@pytest.mark.skipif(RANKS not in (2, 4), reason="a pipeline of two")
def test_asynchronous_pipelines_refuse_it(folder):
    parallel = {"pipe": 2, "schedule": "asynchronous"}
    with pytest.raises(ConfigError, match=r"does not follow from part0\.parts\.0"):
        made(folder, **given(**CUT, **OWN, parallel=parallel)).fit()


@pytest.mark.skipif(RANKS < 3, reason="two workers and a server")
def test_servers_take_a_last_batch_of_fewer_samples_than_workers(folder):
    with made(folder, train_data=Waves(25, 1), server={"ranks": 1, "bound": 0}) as trainer:
        assert len(trainer.fit()) == 2


@pytest.mark.skipif(RANKS < 2, reason="a worker and a server")
def test_servers_refuse_it(folder):
    """And take torch modules whose parameters are all used."""
    own = given(**OWN, server={"ranks": 1})
    with pytest.raises(ConfigError, match=r"part\d.* has no part in the loss"):
        made(folder, **own).fit()
    own |= {"loss": mse, "test_data": Turns(30, 2), "dir": str(folder / "other")}
    own["model"] = lambda: nn.Sequential(Of(lambda m, x: x[0]), nn.Linear(6, 1)).double()
    with made(folder, **own) as trainer:
        assert len(trainer.fit()) == 1


class TwoNorms(nn.Module):
    """Batch norm before two outputs, and another one before the second alone."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.head = nn.Linear(8, 1)

    def forward(self, x, special):
        x = self.first(x)
        return {"y": self.head(x), "more": self.second(x), "special": special}


def of_both(outputs, labels):
    """The second output counts where samples are special."""
    at = outputs["special"][:, 0] > 0
    total = ((outputs["y"] - labels) ** 2).sum()
    return total + (outputs["more"][at] ** 2).sum() if at.any() else total, len(labels)


def test_ranks_go_backward_together_through_norms_that_one_of_them_uses(folder, alone):
    """As one process: also in batches in which no rank uses them."""
    data = Turns(48, special=(0, 13, 15))
    own = given(model=lambda: TwoNorms().double(), loss=of_both, train_data=data, batch_size=6)
    with made(folder, **own) as trainer:
        trainer.fit()
    _, wanted = alone(**own)
    found, wanted = (module.state_dict() for module in (trainer.module, wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
