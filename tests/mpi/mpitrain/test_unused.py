"""Parameters that the loss does not follow from stay as torch leaves them.

``test_unused_drawn.py`` draws modules, optimisers, codes and strategies.
"""

import numpy as np
import pytest

import mpitrain
from mpitrain.config import ConfigError
from tests.mpi.mpitrain.fits import RANKS, assert_interrupted_alike, layouts, loop, made

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]


class Turns(torch.utils.data.IterableDataset):
    """Points of a surface in a fixed order, with a flag for each kind of special ones."""

    #: By kind; in the second, fourth and sixth batch of 24.
    SPECIAL = ((30, 31, 80, 120),)

    def __init__(self, samples, seed, special=SPECIAL):
        self.samples, self.seed, self.special = samples, seed, special

    def __len__(self):
        return self.samples

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed)
        for number in range(self.samples):
            x = torch.rand(6, generator=draw).double() * 4 - 2
            special = torch.tensor([number in kind for kind in self.special]).double()
            yield (x, special), (torch.sin(x[0]) * x[1] + x[2])[None]


class Branches(torch.nn.Module):
    """Of what it has, some is never called, some gives what the loss leaves out, and some is used
    for special samples alone."""

    decides = True

    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(6, 8)
        self.never = torch.nn.Linear(8, 8)
        self.aside = torch.nn.Linear(8, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.behind = torch.nn.Linear(8, 1)  # of what aside gives
        self.rare = torch.nn.Linear(8, 8)
        self.leave = torch.nn.Linear(8, 1)

    def forward(self, x, special):
        x = torch.tanh(self.enter(x))
        aside = self.aside(x)
        x = torch.tanh(self.middle(x))
        if self.decides and bool((special > 0).any()):
            x = x + special * self.rare(x)
        return {"y": self.leave(x), "aside": self.behind(aside)}


class Cut(Branches):
    """Without values that decide, so that it can be cut: aside crosses the cut."""

    decides = False


def of_one(outputs, labels):
    return torch.nn.functional.mse_loss(outputs["y"], labels)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)


def given(model, optimizer, **changed):
    return {
        "model": model,
        "loss": of_one,
        "metrics": None,
        "train_data": Turns(144, 1),
        "test_data": Turns(30, 2),
        "optimizer": optimizer,
    } | changed


def torchs_own(model):
    torch.manual_seed(7)
    module = model().double()
    batches = [*torch.utils.data.DataLoader(Turns(144, 1), 24)] * 2
    loop(module, adamw, batches, lambda module, batch: of_one(module(*batch[0]), batch[1]))
    return module


def assert_alike(module, other):
    wanted = other.state_dict()
    for name, found in module.state_dict().items():
        np.testing.assert_allclose(found, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        begin = type(other)().state_dict()
    for name in ("never.weight", "aside.weight", "behind.bias"):
        assert torch.equal(module.state_dict()[name], begin[name]), name


def test_what_is_used_now_and_then_is_torchs(folder):
    """Used on one rank is used; the others' counts of steps go on without it."""
    with made(folder, **given(Branches, adamw, parallel={"zero": 1})) as trainer:
        trainer.fit()
    assert_alike(trainer.module, torchs_own(Branches))
    left_out = trainer.parts.updater.left_out
    assert left_out["part0.rare.weight"] == 6
    assert left_out["part0.never.weight"] == 12


@pytest.mark.parametrize("parallel", layouts())
def test_what_crosses_a_cut_and_is_not_used(folder, parallel):
    cuts = ["enter", "aside", "middle"]
    changed = {"parallel": parallel | {"checksums": RANKS == 3}, "cuts": cuts}
    with made(folder, **given(Cut, adamw, **changed)) as trainer:
        trainer.fit()
    assert_alike(trainer.module, torchs_own(Cut))


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"parallel": {"zero": 2}}, marks=pytest.mark.slow),
        {"sync": {"kind": "local", "period": 2, "agree": 3}},
    ],
    ids=["data", "zero 2", "workers"],
)
def test_an_interrupted_run_counts_on(folder, how):
    """Each worker by itself, if they are told late."""
    changed = given(Branches, adamw, checkpoint={"every": 3}, **how)
    assert_interrupted_alike(folder, changed, {})


def test_batches_of_fewer_samples_than_ranks(folder):
    """An empty share uses nothing."""
    changed = given(Cut, adamw, batch_size=2, steps=3)
    with made(folder, **changed) as trainer:
        trainer.fit()
        assert set(trainer.parts.updater.left_out.values()) == {3}
        unused = {name.split(".")[1] for name in trainer.parts.updater.left_out}
        assert unused == {"never", "aside", "behind", "rare"}


@pytest.mark.skipif(RANKS not in (2, 4), reason="a pipeline of two")
def test_asynchronous_pipelines_refuse_it(folder):
    changed = given(
        Cut,
        None,
        cuts=["enter", "aside", "middle"],
        optim={"name": "adam", "lr": 0.01},
        parallel={"pipe": 2, "schedule": "asynchronous"},
    )
    del changed["optimizer"]
    trainer = made(folder, **changed)
    with pytest.raises(ConfigError, match=r"does not follow from part0\.never"):
        trainer.fit()


@pytest.mark.skipif(RANKS < 2, reason="a worker and a server")
@pytest.mark.parametrize("model", [Cut, lambda: torch.nn.Sequential(Pair(), Cut().enter)])
def test_servers_refuse_it(folder, model):
    """And take torch modules whose parameters are all used."""
    trainer = mpitrain.Trainer(
        model=model,
        train_data=Turns(48, 1),
        test_data=Turns(30, 2),
        loss=of_one if model is Cut else of_all,
        optim={"name": "adam", "lr": 0.01, "weight_decay": 0.3},
        batch_size=24,
        epochs=1,
        dtype="float64",
        dir=str(folder / "run"),
        server={"ranks": 1},
    )
    if model is Cut:
        with pytest.raises(ConfigError, match=r"part0.(aside|never).* has no part in the loss"):
            trainer.fit()
    else:
        assert len(trainer.fit()) == 1
        trainer.close()


class Pair(torch.nn.Module):
    """The first of two."""

    def forward(self, pair):
        return pair[0]


def of_all(outputs, labels):
    return (outputs.mean(1, keepdim=True) - labels).square().mean()


class Flat(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(64, 10)
        self.never = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.used(x.flatten(1))


@pytest.mark.skipif(RANKS < 2, reason="a quorum")
def test_a_quorum_leaves_it_alone(folder):
    trainer = mpitrain.Trainer(
        model=Flat, optimizer=adamw, data={"name": "digits"}, batch_size=64, steps=4, epochs=1,
        sync={"kind": "quorum", "quorum": 1}, run={"dir": str(folder / "run")},
    )  # fmt: skip
    with trainer:
        trainer.fit()
        assert trainer.parts.updater.left_out == {"part0.never": 4}
    assert trainer.module.never.tolist() == [1.0, 1.0]
    assert not trainer.module.used.weight.isnan().any()
