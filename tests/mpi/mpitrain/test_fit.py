"""``mpitrain.Trainer``: a torch model, a data set, a loss and metrics of one's own."""

import os
import random
import signal

import numpy as np
import pytest
from mpi4py import MPI

import mpitrain
from collectives import Communicator
from mpitrain.checkpoint import CheckpointError
from mpitrain.config import Config, ConfigError, Data, Model, Optim, Own
from mpitrain.data import DataError
from mpitrain.fields import fields
from mpitrain.metrics import Overlap
from mpitrain.optim.optimizers import Adam
from mpitrain.ranks.stop import StopFlag, Stopped
from mpitrain.run import train
from mpitrain.training.evaluation import evaluate
from mpitrain.training.loop import Batch

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]
RANKS = MPI.COMM_WORLD.size


class Waves(torch.utils.data.Dataset):
    """Points of a surface, jittered anew in each epoch by the generators that data sets use."""

    def __init__(self, samples, seed, jitter=0.05):
        self.samples, self.seed, self.jitter, self.read = samples, seed, jitter, []

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.read.append(index)
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        x = torch.rand(6, generator=draw) * 4 - 2
        noise = torch.randn(()).item() + np.random.normal() + random.gauss(0, 1)
        return x, (torch.sin(x[0]) * x[1] + x[2] * x[3] + self.jitter * noise)[None]


class Quadrants(Waves):
    """In which quadrant the first two lie."""

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        return x.numpy(), int(x[0] > 0) + 2 * int(x[1] > 0)


def net(outputs=1):
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, outputs),
    )


def regular():
    """With dropout and batch norm, in and outside of a part of the Sequential."""
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Sequential(
            torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16, momentum=None), torch.nn.Dropout(0.2)
        ),
        torch.nn.Linear(16, 1),
    )


class Block(torch.nn.Module):
    """A residual block."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.up(self.norm(x))))


class Whole(torch.nn.Module):
    """No Sequential: blocks called by name, a frozen one, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(6, 16)
        self.blocks = torch.nn.ModuleList(Block(16) for _ in range(3))
        self.leave = torch.nn.Linear(16, 1)
        self.gain = torch.nn.Parameter(torch.ones(16))
        self.blocks[1].up.requires_grad_(False)

    def forward(self, x):
        x = self.enter(x) * self.gain
        for block in self.blocks:
            x = block(x)
        return self.leave(x * self.gain)


CUTS = ["enter", "blocks.0", "blocks.1"]


def made(folder, comm=None, **changed):
    given = {
        "model": net,
        "train_data": Waves(100, 1),
        "test_data": Waves(30, 2),
        "loss": torch.nn.functional.mse_loss,
        "metrics": {"mae": lambda y, t: (y - t).abs().mean(), "n": lambda y, t: (len(y), 1)},
        "optim": {"name": "adam", "lr": 0.01, "reference_batch": 0},
        "batch_size": 24,
        "epochs": 2,
        "seed": 7,
        "dtype": "float64",
        "dir": str(folder / "run"),
    }
    if "optimizer" in changed:
        del given["optim"]
    return mpitrain.Trainer(comm, **(given | changed))


def layouts():
    found = {"data": {}, "recompute": {"recompute": True}, "zero": {"zero": 2}}
    if RANKS in (2, 3, 4):
        found["pipe"] = {"pipe": RANKS}
    if RANKS == 4:
        found["data x pipe"] = {"pipe": 2, "schedule": "zero_bubble"}
    quick = list(found)[-1]
    return [
        pytest.param(parallel, marks=() if name == quick else pytest.mark.slow, id=name)
        for name, parallel in found.items()
    ]


@pytest.fixture
def alone(comm, folder):
    """The same in one process, for each rank."""

    def run(**changed):
        own = str(folder / f"alone{comm.rank}")
        with made(folder, MPI.COMM_SELF, **changed, dir=own) as trainer:
            return trainer.fit(), trainer.module

    return run


@pytest.mark.parametrize("parallel", layouts())
def test_every_layout_is_one_process(comm, folder, alone, parallel):
    train_data = Waves(100, 1)
    with made(folder, parallel=parallel, train_data=train_data) as trainer:
        tests = trainer.fit()
    expected, module = alone()
    assert [t.epoch for t in tests] == [0, 1]
    for found, wanted in zip(tests, expected, strict=True):
        assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-11)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-11)
    # The module holds the trained values.
    for found, wanted in zip(trainer.module.parameters(), module.parameters(), strict=True):
        np.testing.assert_allclose(found.detach(), wanted.detach(), rtol=1e-7, atol=1e-9)
    assert not torch.equal(trainer.module[0].weight, net()[0].weight)
    if not parallel:  # each rank has read its own, and a few for the digest
        assert len(train_data.read) <= 2 * (100 // RANKS + 10) + 20


@pytest.mark.parametrize("parallel", layouts())
def test_dropout_and_batch_norm(comm, folder, alone, parallel):
    with made(folder, model=regular, parallel=parallel) as trainer:
        tests = trainer.fit()
    expected, module = alone(model=regular)
    for found, wanted in zip(tests, expected, strict=True):
        assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-9)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-9)
    found, wanted = trainer.module.state_dict(), module.state_dict()
    assert found.keys() == wanted.keys() == regular().state_dict().keys()
    assert found["1.num_batches_tracked"] == 10
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, atol=1e-8)
    # It is a module of torch that gives the trained model's results.
    trainer.module.eval().double()
    x, y = (torch.from_numpy(a) for a in vars(trainer.parts.data.test[:]).values())
    loss = torch.nn.functional.mse_loss(trainer.module(x), y)
    assert loss.item() == pytest.approx(tests[-1].test_loss, rel=1e-5)


class TakesNoEmptyBatch(torch.nn.Module):
    """As most modules do that call ``view``; with batch norm, or without."""

    def __init__(self, norm):
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(6, 16), torch.nn.Linear(16, 1)
        self.norm = torch.nn.BatchNorm1d(16) if norm else torch.nn.Identity()
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        y = self.drop(self.norm(self.enter(x.view(x.size(0), -1))))
        return self.leave(y.view(x.size(0), -1))


class OfImages(torch.nn.Module):
    """Batch norm of channels, and a ``view`` of what comes out of it."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = torch.nn.Conv2d(1, 4, 2), torch.nn.Linear(8, 1)
        self.norm = torch.nn.BatchNorm2d(4)

    def forward(self, x):
        y = torch.relu(self.norm(self.enter(x.view(-1, 1, 2, 3))))
        return self.leave(y.view(x.size(0), -1))


FIRST = {
    "plain": lambda: TakesNoEmptyBatch(False),
    "batch norm": lambda: TakesNoEmptyBatch(True),
    "of images": OfImages,
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("parallel", layouts())
def test_ranks_without_samples(comm, folder, alone, parallel, first):
    """Of the last batch of an epoch, which has one sample, and of a test on three."""
    changed = {
        "model": lambda: torch.nn.Sequential(
            FIRST[first](), *(torch.nn.Linear(1, 1) for _ in range(RANKS - 1))
        ),
        "train_data": Waves(49, 1),
        "test_data": Waves(3, 2),
    }
    with made(folder, parallel=parallel, **changed) as trainer:
        tests = trainer.fit()
    expected, module = alone(**changed)
    for found, wanted in zip(tests, expected, strict=True):
        assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-9)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-9)
    found, wanted = trainer.module.state_dict(), module.state_dict()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-8)


class AlsoUnread(torch.nn.Module):
    """Two results, of which a loss may read one: batch norm of the other goes backward nowhere."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)
        self.leave = torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.leave(x), self.norm(self.enter(x))


def test_a_rank_without_samples_from_the_first_step_on(comm, folder, alone):
    """It knows what the loss does not read although it has never called it with samples."""
    changed = {
        "model": AlsoUnread,
        "loss": lambda outputs, labels: torch.nn.functional.mse_loss(outputs[0], labels),
        "metrics": {},
        "train_data": Waves(6, 1),
        "batch_size": 1,
        "epochs": 1,
    }
    with made(folder, **changed) as trainer:
        (found,) = trainer.fit()
    (wanted,), _ = alone(**changed)
    assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-9)


def test_a_trainer_frees_the_communicator_that_it_made(comm, folder, monkeypatch):
    """Also one that was refused; one that it was given stays the program's."""
    closed, close = [], Communicator.close
    monkeypatch.setattr(Communicator, "close", lambda self: (closed.append(self), close(self))[1])
    given = {"train_data": Waves(2 * RANKS, 1), "batch_size": RANKS, "epochs": 1}
    with made(folder, **given) as trainer:
        assert not closed
    assert any(one is trainer.parts.comm for one in closed)
    closed.clear()
    with pytest.raises(ConfigError, match=r"train\.batch_size"):
        made(folder, **given | {"batch_size": 4 * RANKS})
    assert len(closed) == 1
    closed.clear()
    with made(folder, comm, **given) as trainer:
        assert trainer.parts.comm is comm
    assert not any(one is comm for one in closed)


def test_a_closed_trainer_says_so_and_touches_no_file(comm, folder):
    with made(folder, comm, test_data=Waves(8, 2), epochs=1) as trainer:
        trainer.fit()
    kept = sorted((folder / "run" / "checkpoints").iterdir())
    for use in (
        trainer.fit,
        lambda: train(trainer),
        lambda: trainer.loop.step(Batch(0, [np.arange(RANKS)])),
        lambda: evaluate(trainer.parts, 0),
    ):
        with pytest.raises(RuntimeError, match="this trainer is closed"):
            use()
    assert sorted((folder / "run" / "checkpoints").iterdir()) == kept


def test_values_that_are_loaded_too_late_are_not_lost(comm, folder):
    with made(folder, comm, model=regular) as trainer:
        trainer.module.load_state_dict(regular().state_dict())
        with pytest.raises(ConfigError, match="other values after the trainer was made"):
            trainer.fit()


def test_hooks_that_come_too_late_are_refused(comm, folder):
    def hooked(parameters):
        parameters = list(parameters)
        parameters[0].register_hook(lambda gradient: 2 * gradient)
        return torch.optim.SGD(parameters, lr=0.01)

    with (
        made(folder, comm, model=regular, optimizer=hooked) as trainer,
        pytest.raises(ConfigError, match="was given a hook on its gradient"),
    ):
        trainer.fit()


@pytest.mark.parametrize("parallel", layouts())
def test_a_run_that_was_interrupted_ends_with_the_same_bits(comm, folder, parallel):
    changed = {"model": regular, "parallel": parallel, "checkpoint": {"every": 3}}
    assert_interrupted_alike(folder, changed, {})


def assert_interrupted_alike(folder, changed, later):
    """A run that stops after 7 steps and goes on, both with ``later``, beside one that does not."""
    with made(folder, **changed) as trainer:
        whole, module = trainer.fit(), trainer.module
    changed = changed | later | {"dir": str(folder / "again")}
    with made(folder, **changed, steps=7) as trainer:
        trainer.fit()
    with made(folder, **changed) as trainer:
        rest = trainer.fit(resume=True)
    assert rest[-1] == whole[-1]
    for name, value in trainer.module.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.3),
}
QUICK = (("AdamW", 1), ("Adagrad", 2))


@pytest.mark.parametrize("parallel", layouts())
def test_a_module_that_is_no_sequential(comm, folder, alone, parallel):
    with made(folder, model=Whole, cuts=CUTS, parallel=parallel) as trainer:
        tests = trainer.fit()
    expected, module = alone(model=Whole, cuts=CUTS)
    for found, wanted in zip(tests, expected, strict=True):
        assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-9)
    found, wanted = trainer.module.state_dict(), module.state_dict()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, atol=1e-8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        begin = Whole().state_dict()
    frozen = {name for name, value in found.items() if torch.equal(value, begin[name])}
    assert frozen == {"blocks.1.up.weight", "blocks.1.up.bias"}


class Sentences(torch.utils.data.Dataset):
    """Several inputs by name, of several types, and two labels."""

    def __init__(self, samples, seed):
        self.samples, self.seed = samples, seed

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        words = torch.randint(9, (5,), generator=draw)
        x = torch.rand(4, generator=draw)
        kept = torch.rand(5, generator=draw) > 0.2
        return {"words": words, "x": x, "kept": kept}, (words.sum() / 20 + x[:1], words[0])


class Reader(torch.nn.Module):
    """Several tensors cross where it may be cut, and it gives several."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(9, 8)
        self.of_x = torch.nn.Linear(4, 8)
        self.drop = torch.nn.Dropout(0.1)
        self.mix = torch.nn.Linear(8, 8)
        self.value, self.first = torch.nn.Linear(8, 1), torch.nn.Linear(8, 9)

    def forward(self, words, x, kept):
        y = (self.table(words) * kept[..., None]).mean(1)
        y = self.drop(y + self.of_x(x))
        z = torch.tanh(self.mix(y)) + x.mean(1, keepdim=True)
        return {"value": self.value(z + y), "first": self.first(z)}


def of_both(outputs, labels):
    value, first = labels
    mse = torch.nn.functional.mse_loss(outputs["value"], value)
    return mse + 0.1 * torch.nn.functional.cross_entropy(outputs["first"], first)


SEVERAL = {
    "model": Reader,
    "loss": of_both,
    "cuts": ["of_x", "drop", "mix"],
    "metrics": {"hits": lambda y, t: (y["first"].argmax(1) == t[1]).double().mean()},
}


@pytest.mark.parametrize("parallel", layouts())
def test_several_inputs_and_outputs(comm, folder, alone, parallel):
    data = {"train_data": Sentences(100, 1), "test_data": Sentences(30, 2), "workers": 1}
    with made(folder, **SEVERAL, **data, parallel=parallel) as trainer:
        tests = trainer.fit()
    expected, module = alone(**SEVERAL, **data)
    for found, wanted in zip(tests, expected, strict=True):
        assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-9)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-9)
    for name, value in trainer.module.state_dict().items():
        np.testing.assert_allclose(value, module.state_dict()[name], rtol=1e-6, atol=1e-8)
    with torch.no_grad():
        samples = trainer.parts.data.test[:]
        inputs = {n: torch.from_numpy(a) for n, a in fields(samples.inputs).items()}
        labels = [torch.from_numpy(a) for a in fields(samples.labels).values()]
        loss = of_both(trainer.module.double().eval()(**inputs), labels)
    assert loss.item() == pytest.approx(tests[-1].test_loss, rel=1e-5)


def test_without_dropout_it_is_torchs_own_loop(comm, folder):
    class Plain(Reader):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Identity()

    data = {"train_data": Sentences(100, 1), "test_data": Sentences(30, 2), "optim": {}}
    factory = OPTIMIZERS["AdamW"]
    with made(folder, **SEVERAL | {"model": Plain}, **data, optimizer=factory) as trainer:
        trainer.fit()
    torch.manual_seed(7)
    module = Plain().double()
    optimizer = factory(list(module.parameters()))
    for epoch in range(2):
        for batch in trainer.parts.sampler.batches(epoch):
            some = trainer.parts.data.train.in_epoch(epoch)[batch]
            inputs, labels = (
                {n: torch.from_numpy(a) for n, a in fields(part).items()}
                for part in (some.inputs, some.labels)
            )
            optimizer.zero_grad()
            of_both(module(**inputs), tuple(labels.values())).backward()
            optimizer.step()
    assert_alike(trainer.module, module)


def in_groups(parameters):
    """No decay of what has one axis, and another rate for one tensor."""
    rest = [p for p in parameters if p.ndim > 1]
    return torch.optim.AdamW(
        [
            {"params": rest[1:], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            {"params": rest[:1], "weight_decay": 0.2, "lr": 1e-4, "betas": (0.5, 0.9)},
        ],
        lr=3e-3,
    )


def torchs_own(trainer, factory, steps=None):
    """A module that torch trained on the same samples in the same order."""
    torch.manual_seed(7)
    module = net().double()
    optimizer = factory(list(module.parameters()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for epoch in range(2):
        for batch in trainer.parts.sampler.batches(epoch):
            some = trainer.parts.data.train.in_epoch(epoch)[batch]
            optimizer.zero_grad()
            y = module(torch.from_numpy(some.inputs))
            torch.nn.functional.mse_loss(y, torch.from_numpy(some.labels)).backward()
            optimizer.step()
            schedule.step()
    return module


def assert_alike(module, other):
    for found, wanted in zip(module.parameters(), other.parameters(), strict=True):
        np.testing.assert_allclose(found.detach(), wanted.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("parallel", layouts())
def test_groups_of_parameters(comm, folder, parallel):
    changed = {"optimizer": in_groups, "optim": {"schedule": "cosine"}, "parallel": parallel}
    with made(folder, **changed) as trainer:
        trainer.fit()
    assert_alike(trainer.module, torchs_own(trainer, in_groups))


@pytest.mark.parametrize("parallel", layouts())
def test_groups_of_a_job(comm, folder, parallel):
    """The job's own optimiser with groups is torch's with the same."""
    groups = [
        {"names": ["part0.weight"], "lr": 0.5, "weight_decay": 0.2},
        {"names": ["*.bias"], "weight_decay": 0.0},
    ]
    optim = {"name": "adamw", "lr": 3e-3, "reference_batch": 0, "weight_decay": 0.1}
    optim |= {"schedule": "cosine", "groups": groups}

    def same(parameters):
        first, *rest = parameters
        weights, biases = ([p for p in rest if (p.ndim > 1) == is_weight] for is_weight in (1, 0))
        return torch.optim.AdamW(
            [
                {"params": weights, "weight_decay": 0.1},
                {"params": biases, "weight_decay": 0.0},
                {"params": [first], "weight_decay": 0.2, "lr": 1.5e-3},
            ],
            lr=3e-3,
        )

    with made(folder, optim=optim, parallel=parallel) as trainer:
        trainer.fit()
    assert_alike(trainer.module, torchs_own(trainer, same))


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        pytest.param(name, zero, marks=() if (name, zero) in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
        for zero in (0, 1, 2)
    ],
)
def test_optimisers_of_torch(comm, folder, alone, name, zero):
    """The same as in torch's own loop, also when it is interrupted."""
    changed = {
        "optimizer": OPTIMIZERS[name],
        "optim": {"schedule": "cosine"},
        "parallel": {"zero": zero},
        "checkpoint": {"every": 2},
    }
    with made(folder, **changed, steps=7) as trainer:
        trainer.fit()
    with made(folder, **changed) as trainer:
        trainer.fit(resume=True)
    assert_alike(trainer.module, torchs_own(trainer, OPTIMIZERS[name]))


def hooked(parameters):
    made = torch.optim.SGD(parameters, lr=0.1)
    made.register_step_post_hook(lambda *given: None)
    return made


def stepped(parameters):
    made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    made.state[parameters[0]]["momentum_buffer"] = torch.ones_like(parameters[0])
    return made


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (hooked, "it has hooks on its steps, and nobody would call them"),
        (stepped, "it has taken steps already, and the trainer would begin without what it keeps"),
        (lambda p: torch.optim.LBFGS(p), "a LBFGS does not update each number by itself"),
        (lambda p: torch.optim.SGD(p[1:]), r"leaves out part0.weight; give it all parameters"),
        (lambda p: torch.optim.SGD([*p, torch.nn.Parameter(torch.ones(3))]), "shape .3,. that is"),
        (
            lambda p: torch.optim.Adam([{"params": p[1:]}, {"params": p[:1], "amsgrad": True}]),
            "all groups keep the same: exp_avg, exp_avg_sq, not exp_avg, exp_avg_sq, max_exp",
        ),
    ],
)
def test_optimisers_that_cannot_be(comm, folder, optimizer, message):
    with pytest.raises(ConfigError, match=message):
        made(folder, optimizer=optimizer)


@pytest.mark.quick_on(2)
@pytest.mark.parametrize("zero", [0, 3])
def test_the_module_has_the_averages_that_were_tested(comm, folder, zero):
    changed = {"optimizer": OPTIMIZERS["AdamW"], "average": 0.8, "parallel": {"zero": zero}}
    with made(folder, **changed) as trainer:
        tests = trainer.fit()
        x, y = (torch.from_numpy(a) for a in vars(trainer.parts.data.test[:]).values())
    loss = torch.nn.functional.mse_loss(trainer.module.double()(x), y)
    assert loss.item() == pytest.approx(tests[-1].test_loss, rel=1e-6)
    with made(folder, **(changed | {"average": 0.0})) as trainer:
        assert trainer.fit()[-1].test_loss != pytest.approx(tests[-1].test_loss, rel=1e-3)


@pytest.mark.parametrize("parallel", layouts())
def test_a_schedule_of_ones_own_is_torchs(comm, folder, parallel):
    """Rank 0's function counts, so that no rank has another rate; interrupted, it goes on."""
    schedule = lambda step: 1 / (1 + step + (comm.rank if parallel else 0))  # noqa: E731
    changed = {"schedule": schedule, "optim": {"name": "sgd", "lr": 0.05, "reference_batch": 0}}
    with made(folder, **changed, parallel=parallel, steps=7) as trainer:
        trainer.fit()
    with made(folder, **changed, parallel=parallel) as trainer:
        trainer.fit(resume=True)
        data, batches = trainer.parts.data.train, trainer.parts.sampler.batches
    torch.manual_seed(7)
    module = net().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    lambda_lr = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for epoch in range(2):
        for batch in batches(epoch):
            some = data.in_epoch(epoch)[batch]
            optimizer.zero_grad()
            y = module(torch.from_numpy(some.inputs))
            torch.nn.functional.mse_loss(y, torch.from_numpy(some.labels)).backward()
            optimizer.step()
            lambda_lr.step()
    for found, wanted in zip(trainer.module.parameters(), module.parameters(), strict=True):
        np.testing.assert_allclose(found.detach(), wanted.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "loss",
    ["cross_entropy", pytest.param(torch.nn.functional.cross_entropy, marks=pytest.mark.slow)],
)
def test_classes(comm, folder, alone, loss):
    changed = {
        "model": lambda: net(4),
        "train_data": Quadrants(100, 1),
        "test_data": Quadrants(30, 2),
        "loss": loss,
        "metrics": ["accuracy", "top2"],
    }
    with made(folder, **changed) as trainer:
        tests = trainer.fit()
    expected, _ = alone(**changed)
    assert tests[-1].test_loss == pytest.approx(expected[-1].test_loss, rel=1e-11)
    assert tests[-1].metrics == expected[-1].metrics


def test_what_is_random_follows_from_seed_epoch_and_sample(comm, folder):
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    with made(folder) as trainer:
        first = trainer.parts.data.train.in_epoch(0)[np.array([3, 4])]
        again = trainer.parts.data.train.in_epoch(0)[np.array([4])]
        later = trainer.parts.data.train.in_epoch(1)[np.array([4])]
    assert np.array_equal(first.labels[1:], again.labels)
    assert np.array_equal(first.inputs[1:], later.inputs)
    assert not np.array_equal(again.labels, later.labels)
    assert before[0] == random.getstate() and (before[1] == np.random.get_state()[1]).all()
    assert torch.equal(before[2], torch.get_rng_state())


class Signs(Waves):
    """1 or 0, but of one sample -1 or -2."""

    at = 37

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, (y > 0).float() - 2.0 * (index == self.at)


class Torn(Waves):
    """A sample that the last rank cannot read."""

    at = 37

    def __getitem__(self, index):
        if index == self.at and MPI.COMM_WORLD.rank == RANKS - 1:
            raise OSError("bad sector")
        return super().__getitem__(index)


class Odd(Waves):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x, y) if index % 5 != 3 else (x[:4], y)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"train_data": Odd(100, 1)}, DataError, r"the input of sample \d+ of Odd is float64 of"),
        ({"train_data": [1, 2, 3]}, DataError, r"sample 0 of list is a int; a pair is needed"),
        ({"train_data": []}, DataError, "train_data has no samples"),
        (
            {"model": lambda: net(3)},
            ConfigError,
            r"loss: mse_loss cannot compare outputs of shape \(3,\) with",
        ),
        (
            {"loss": lambda y, t: (y - t) ** 2},
            ConfigError,
            r"loss: <lambda> gives a tensor of shape \(2, 1\); a loss is one number",
        ),
        ({"loss": lambda y, t: 1.0}, ConfigError, "loss: <lambda> gives a float"),
        ({"loss": lambda y, t: t.mean()}, ConfigError, "a number without a gradient"),
        (
            {"model": torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(5, 1))},
            ConfigError,
            "model: layer part1: it cannot take a sample of shape",
        ),
        ({"model": torch.nn.Sequential()}, ConfigError, "model: it has no layers"),
        ({"model": {}}, ConfigError, "model: it has no layers"),
        ({"metrics": ["accuracy"]}, ConfigError, "evaluate.metrics: labels are numbers, and acc"),
        ({"schedule": lambda step: 3 - step}, ConfigError, "the function gives -1 at step 4"),
        (
            {"schedule": abs, "optim": {"schedule": "cosine"}},
            ConfigError,
            "optim.schedule = 'cosine' with optim.warmup_epochs = 0: a schedule of one's own takes",
        ),
        ({"schedule": "cosine"}, TypeError, "schedule is a key of several tables"),
        ({"batchsize": 4}, TypeError, "batchsize is no setting of a job; did you mean batch_size?"),
        ({"name": "adam"}, TypeError, "key of several tables"),
        (
            {"layers": {"one": mpitrain.nn.ReLU()}},
            ConfigError,
            'layers: this is model.layers, .* give layers of your own as model={"name": layer, ',
        ),
        ({"batch_size": 0}, ConfigError, "train.batch_size"),
        ({"train_data": None}, TypeError, "test_data without train_data"),
        ({"test_data": Quadrants(30, 2)}, DataError, "train_data has labels of float64, shape"),
        (
            {
                "model": lambda: net(3),
                "train_data": Quadrants(100, 1),
                "test_data": Quadrants(30, 2),
                "loss": "cross_entropy",
                "metrics": ["accuracy"],
            },
            DataError,
            r"sample \d+ of Quadrants has the label 3; labels of 3 classes lie from 0 to 2",
        ),
    ],
)
def test_bad_input_is_one_sentence_on_all_ranks(comm, folder, changed, error, message):
    with pytest.raises(error, match=message), made(folder, **changed) as trainer:
        trainer.fit()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (lambda r: {"epochs": 1 + r}, ConfigError, "jobs: train.epochs is 1 on rank 0 and 2 on"),
        (lambda r: {"batch_size": 24 - r}, ConfigError, "jobs: train.batch_size is 24 on rank 0"),
        (
            lambda r: {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1 * (1 + r))},
            ConfigError,
            "jobs: optim.lr is 0.1 on rank 0 and 0.2 on rank",
        ),
        (
            lambda r: {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1 * r)},
            ConfigError,
            "jobs: weight_decay of the optimizer's group 0 is 0 on rank 0 and 0.1",
        ),
        (
            lambda r: {"model": lambda: torch.nn.Sequential(torch.nn.Dropout(0.1 * r), net())},
            ConfigError,
            r"jobs: model\.0 is 'Dropout\(p=0.0, inplace=False\)' on rank 0 and 'Dropout\(p=0.1",
        ),
        (lambda r: {"test_data": None} if r else {}, ConfigError, "jobs: test_data is True on"),
        (lambda r: {"nonsense": 1} if r else {}, TypeError, r"is no setting of a job.*\(rank 1 of"),
        (lambda r: {"batch_size": 1 - r}, ConfigError, r"train.batch_size.*\(rank 1 of"),
    ],
    ids=["epochs", "batch", "rate", "decay", "dropout", "tests", "nonsense", "none"],
)
def test_ranks_that_ask_for_other_jobs_are_told(comm, folder, own, error, message):
    with pytest.raises(error, match=message):
        made(folder, **own(min(comm.rank, 1)))


def test_a_flag_of_the_programs_own_and_signals_stop_it(comm, folder):
    stop = StopFlag()
    with made(folder, stop=stop) as trainer:
        if comm.rank == RANKS - 1:
            stop.reason = "asked by the program"
        with pytest.raises(Stopped, match=r"step 1 of 10 \(asked by the program\)"):
            trainer.fit()
        stop.reason = ""
    if RANKS > 1:
        comm.Barrier()

    def kill(parts):
        if parts.steps_done == 2 and comm.rank == RANKS - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with made(folder, stop=stop, before_step=kill) as trainer:
        with pytest.raises(Stopped, match=r"step 3 of 10 \(signal SIGUSR1\)"):
            trainer.fit()
        assert not stop.reason
        trainer.fit(resume=True)
        assert trainer.parts.steps_done == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_one_rank_cannot_read_ends_all(comm, folder, workers):
    """Whoever has it; where another rank has it, nobody is disturbed."""
    pipe = {"pipe": RANKS} if RANKS in (2, 3, 4) else {}
    with (
        pytest.raises(DataError, match=r"sample 37 of Torn cannot be read: OSError: bad sector"),
        made(folder, train_data=Torn(100, 1), parallel=pipe, workers=workers) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize(("part", "number"), [("train", 37), ("test", 4 * (RANKS - 1) + 1)])
def test_a_label_that_is_no_probability_ends_all(comm, folder, part, number):
    signs, sound = Signs(100, 1), Signs(100, 1)
    signs.at, sound.at = number, -1
    data = {"train_data": sound, "test_data": sound, f"{part}_data": signs}
    told = rf"sample {number} to {part} on has the label -[12].0, and binary_cross_entropy takes"
    with (
        pytest.raises(DataError, match=told),
        made(folder, loss="binary_cross_entropy", batch_size=4, epochs=1, **data) as trainer,
    ):
        trainer.fit()


def test_a_test_sample_that_one_rank_cannot_read_ends_all(comm, folder):
    pipe = {"pipe": RANKS} if RANKS in (2, 3, 4) else {}
    torn = Torn(100, 1)
    torn.at = 4 * (RANKS - 1) + 1  # in the last rank's batch
    with (
        pytest.raises(DataError, match=f"sample {torn.at} of Torn cannot be read: OSError: bad"),
        made(folder, test_data=torn, batch_size=4, parallel=pipe, workers=1) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize("parallel", layouts())
def test_reading_ahead_changes_no_bit(comm, folder, parallel):
    found = []
    for workers in (0, 2):
        changed = {"model": regular, "parallel": parallel, "workers": workers, "epochs": 2}
        with made(folder, **changed, dir=str(folder / str(workers))) as trainer:
            found.append((trainer.fit(), trainer.module.state_dict()))
    (tests, values), *others = found
    for other_tests, other_values in others:
        assert tests == other_tests
        assert all(torch.equal(value, other_values[name]) for name, value in values.items())


@pytest.mark.parametrize("parallel", layouts())
def test_a_run_that_reads_ahead_may_be_interrupted(comm, folder, parallel):
    changed = {"parallel": parallel, "checkpoint": {"every": 3}, "optimizer": OPTIMIZERS["AdamW"]}
    assert_interrupted_alike(folder, changed | {"model": regular}, {"workers": 2})


def test_windows_of_an_asynchronous_pipeline_are_read_ahead(comm, folder):
    parallel = {"schedule": "asynchronous", "window": 3, "pipe": RANKS if RANKS < 5 else 1}
    found = []
    for workers in (0, 2):
        changed = {"parallel": parallel, "workers": workers, "dir": str(folder / str(workers))}
        with made(folder, **changed, optim={"name": "sgd", "lr": 0.01}) as trainer:
            found.append(trainer.fit())
    assert found[0] == found[1]


def test_metrics_that_nobody_names_go_by_the_labels(comm, folder):
    with made(folder, comm, metrics=None, epochs=1) as trainer:
        assert list(trainer.fit()[-1].metrics) == ["mae"]
    means = lambda y, t: (y.mean(1, keepdim=True) - t).square().mean()  # noqa: E731
    with made(folder, comm, metrics=None, epochs=1, model=lambda: net(3), loss=means) as trainer:
        assert not trainer.fit()[-1].metrics
    both = {"train_data": Sentences(48, 1), "test_data": Sentences(30, 2)}
    several = SEVERAL | both | {"epochs": 1}
    with made(folder, comm, **several | {"metrics": None}) as trainer:
        assert not trainer.fit()[-1].metrics
    with pytest.raises(ConfigError, match="accuracy is of one output and one label, and there are"):
        made(folder, comm, **several | {"metrics": ["accuracy"]})


def test_tables_are_settings_too(comm, folder):
    tables = {
        "model": {"kind": "mlp", "hidden": [8]},
        "loss": {"name": "cross_entropy", "smoothing": 0.1},
        "evaluate": {"every": 2},
    }
    with mpitrain.Trainer(comm, **tables, metrics=["top3"], dir=str(folder / "run")) as trainer:
        job = trainer.parts.config
    assert (job.model.kind, job.loss.smoothing) == ("mlp", 0.1)
    assert (job.evaluate.every, job.evaluate.metrics) == (2, ("top3",))


def test_a_dropout_that_is_called_twice_has_two_masks(comm):
    from mpitrain.adapters.torch import TorchLayer
    from mpitrain.nn import Context

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x):
            return torch.cat([self.drop(x), self.drop(x)], dim=1)

    layer, x = TorchLayer(Twice()), np.ones((3, 40))
    context = Context(True, samples=np.arange(3))
    first, again = (layer.forward({}, x, context)[0] for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first[:, :40], first[:, 40:])


def test_it_is_the_trainer_of_a_job_too(comm, folder):
    with mpitrain.Trainer(comm, dir=str(folder / "run"), steps=2) as trainer:
        assert trainer.module is None
        assert not isinstance(trainer.parts.updater.optimizer, Adam)
        assert len(trainer.fit()) == 1


class Named(torch.nn.Module):
    """Parts that are called twice, and ``again``: the second time by other names."""

    def __init__(self, again):
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
        self.drop, self.norm = torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(6)
        parts = [self.enter, self.norm, self.drop]
        self.again = torch.nn.ModuleList(parts if again else ())

    def forward(self, x):
        first = self.enter, self.norm, self.drop
        for part in (*first, *(self.again or first)):
            x = part(x)
        return self.leave(x)


def test_a_part_of_two_names_is_one(comm, folder):
    found = []
    for again in (False, True):
        with made(folder, model=lambda again=again: Named(again)) as trainer:
            found.append(([test.test_loss for test in trainer.fit()], trainer.module))
    (one, first), (other, second) = found
    assert one == other
    assert torch.equal(first.norm.running_var, second.again[1].running_var)


class Held(torch.nn.Module):
    """A function that holds on to a module, beside a dropout, for which the module is copied."""

    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = torch.nn.Linear(6, 6), torch.nn.Dropout(0.1), net()
        self.f = lambda x: self.a(x)

    def forward(self, x):
        return self.b(self.drop(self.f(x)))


class Again(torch.nn.Sequential):
    """Goes forward once more within the backward pass."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Tables(torch.nn.Module):
    """Changes its parameters as it goes forward."""

    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(3, 4, max_norm=0.5), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.table((x[:, 0] > 0).long()))


class Resting(Whole):
    """Rests a part of its gradients, and drops out by a function."""

    def forward(self, x):
        with torch.no_grad():
            x = self.enter(x)
        return self.leave(self.blocks[0](x * self.gain))


class Functional(Whole):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.5, self.training))


def hooked():
    module = net()
    module[0].weight.register_hook(lambda g: 2 * g)
    return module


def half_resting():
    module = regular().eval()
    module[1].train()
    return module


def with_hook_on_dropout():
    module = regular()
    module[3].register_forward_hook(lambda m, x, y: 2 * y)
    return module


def with_own_norm():
    module = regular()
    module[4][1].forward = torch.tanh
    return module


def norm_twice():
    norm = torch.nn.BatchNorm1d(6)
    return torch.nn.Sequential(norm, torch.nn.Linear(6, 6), norm, torch.nn.Linear(6, 1))


def with_own_hook():
    module = Whole()
    module.register_forward_hook(lambda m, x, y: 2 * y)
    return module


def summed(y, t):
    return (y - t).square().sum()


def rooted(y, t):
    return (y - t).square().mean().sqrt()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": lambda: Held().double()}, "uses values of parameters that it is not given"),
        (
            {"model": lambda: Again(*net()).double()},
            "uses values of parameters that it is not given",
        ),
        ({"model": Tables}, "changes its parameters in its forward pass"),
        ({"model": Resting, "cuts": ["enter"]}, "give other results than all of it"),
        ({"model": Functional, "cuts": ["enter"]}, "give other results than all of it"),
        ({"model": lambda: Functional().eval(), "cuts": ["enter"]}, "give other results"),
        ({"model": with_own_hook, "cuts": ["enter"]}, "its own hooks belong to no part"),
        ({"model": hooked}, r"0.weight has a hook on its gradient"),
        ({"model": half_resting}, "is in training mode and the module around it is not"),
        ({"model": with_hook_on_dropout}, r"3 .Dropout. has a hook or a forward"),
        ({"model": with_own_norm}, r"4.1 .BatchNorm1d. has a hook or a forward"),
        ({"model": norm_twice}, r"part2. .BatchNorm1d. is in part0, too"),
        ({"loss": summed}, "only a mean over samples with equal weights is the same"),
        ({"loss": rooted}, "only a mean over samples with equal weights is the same"),
    ],
)
def test_what_would_train_other_numbers_is_refused(comm, folder, changed, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        made(folder, **changed, steps=2).fit()


class Odd(Waves):
    """One sample in the middle is wider."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (torch.cat([x, x]) if index == 37 else x), y


@pytest.mark.parametrize("part", ["train_data", "test_data"])
def test_a_sample_of_another_shape_ends_all(comm, folder, part):
    with pytest.raises(DataError, match="all must be alike"):
        made(folder, **{part: Odd(100, 1)}, batch_size=RANKS, epochs=1).fit()


def test_keys_that_an_optimizer_of_torch_would_not_see(comm, folder):
    optim = {"weight_decay": 0.1, "schedule": "cosine"}
    with pytest.raises(ConfigError, match="optim: weight_decay would have no part in what"):
        made(folder, optimizer=OPTIMIZERS["AdamW"], optim=optim)
    config = Config(optim=Optim(momentum=0.5))
    with pytest.raises(
        ConfigError, match=r"optim\.momentum: the optimizer that the program brings"
    ):
        made(folder, config=config, optimizer=OPTIMIZERS["AdamW"])


@pytest.mark.parametrize(
    "asked",
    [
        {"lr": 0.5},
        {"optim": {"lr": 0.5}},
        {"config": Config(optim=Optim(lr=0.5))},
        {"optim": {"lr": 0.125}, "reference_batch": 6},
    ],
)
def test_a_rate_beside_an_optimizer_of_torch_is_the_rate(comm, folder, asked):
    with made(folder, optimizer=OPTIMIZERS["SGD"], **asked) as trainer:
        assert trainer.parts.rates.rate(0) == trainer.parts.rates.common(0) == 0.5


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"weight_decay": 0.1}, "optim: weight_decay would have no part in what"),
        ({"config": Config(optim=Optim(weight_decay=0.1))}, r"optim\.weight_decay: the optimizer"),
        ({"smoothing": 0.1}, r"loss\.smoothing: the loss that the program brings"),
        ({"hidden": [8]}, r"model\.hidden: the model that the program brings \(net\) does not"),
        (
            {"test_fraction": 0.5},
            r"data\.test_fraction: the data that the program brings \(Waves\)",
        ),
    ],
)
def test_what_stands_beside_ones_own_and_is_not_read_is_refused(comm, folder, asked, message):
    with pytest.raises(ConfigError, match=message):
        made(folder, optimizer=OPTIMIZERS["SGD"], **asked)


def test_a_job_file_may_say_more_than_the_program_leaves_to_it(comm, folder):
    config = Config(model=Model(kind="mlp", hidden=(8,)), data=Data(test_fraction=0.5))
    with made(folder, config=config) as trainer:
        assert trainer.parts.config.data.test_fraction == 0.5


@pytest.mark.parametrize("key", ["model", "data", "loss", "metrics", "optimizer", "schedule"])
def test_what_a_job_names_of_ones_own_is_not_left_out(comm, folder, key):
    job = Config(own=Own(**{key: "mine.py:name"}))
    with pytest.raises(ConfigError, match=rf"own\.{key} = 'mine\.py:name': a job file that"):
        mpitrain.Trainer(comm, job, dir=str(folder / "run"))


def test_other_jobs_are_not_resumed(comm, folder):
    def frozen():
        module = net()
        module[0].requires_grad_(False)
        return module

    given = {"optimizer": OPTIMIZERS["AdamW"], "optim": {}}
    with made(folder, **given, steps=3) as trainer:
        trainer.fit()
    for changed, message in (
        ({"optimizer": lambda p: torch.optim.Adam(p)}, "own.optimizer was AdamW, and is Adam"),
        ({"loss": torch.nn.functional.l1_loss}, "own.loss was mse_loss, and is l1_loss"),
        ({"model": frozen}, "part0.bias, part0.weight, which the model does not train"),
    ):
        with pytest.raises(CheckpointError, match=message):
            made(folder, **given | changed).fit(resume=True)


class Impure(torch.nn.Module):
    """A part that is no pure function: at once, or only after some calls on one rank."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0
        self.lin = torch.nn.Linear(16, 16)

    def forward(self, x):
        self.calls += 1
        if self.how == "mixes":
            return self.lin(x) - x.mean(0)
        if self.how == "one row":
            return self.lin(x).mean(0)
        if self.how == "random" or (self.calls > 18 and MPI.COMM_WORLD.rank == RANKS - 1):
            return self.lin(x) + torch.rand(x.shape, dtype=x.dtype)
        return self.lin(x)


@pytest.mark.parametrize(
    ("how", "where", "message"),
    [
        ("mixes", 0, "part1 gives a sample another result, or none, when it is alone"),
        ("mixes", -1, "gives a sample another result, or none, when it is alone"),
        ("one row", -1, "cannot take a sample of shape"),
        ("random", -1, "draws random numbers"),
        ("later", -1, "draws random numbers"),
    ],
)
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_no_pure_function_is_an_error_of_all_ranks(comm, folder, how, where, message, zero):
    """Of whichever stage it is, with one message."""

    def model():
        layers = [torch.nn.Linear(6, 16), *(torch.nn.Linear(16, 16) for _ in range(RANKS))]
        layers.insert(1 if where == 0 else len(layers), Impure(how))
        return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))

    parallel = {"zero": zero} if zero else {"pipe": RANKS}
    with pytest.raises(ConfigError, match=message) as raised:
        made(folder, model=model, parallel=parallel).fit()
    assert len(set(comm.allgather(str(raised.value)))) == 1


def test_overlap_by_trying_is_said_and_changes_nothing(comm, folder):
    records = []
    parameters = []
    for overlap in (False, "auto"):
        changed = {"parallel": {"overlap": overlap}, "dir": str(folder / str(overlap))}
        with made(folder, batch_size=12, **changed) as trainer:
            train(trainer, tell=records.append)
            parameters.append(trainer.parts.store.take(0)["weight"].copy())
    np.testing.assert_array_equal(*parameters)
    found = [record for record in records if isinstance(record, Overlap)]
    assert len(found) == (RANKS > 1)
    for record in found:
        assert record.step == 12
        assert record.overlap == (record.seconds_with <= record.seconds_without)
        assert comm.bcast(record) == record


class NamedByItself:
    """A loss whose name is a method, as its address in memory is another on each rank."""

    def name(self):
        return "mse"

    def __call__(self, outputs, labels):
        return torch.nn.functional.mse_loss(outputs, labels)


def test_ranks_may_say_the_same_in_other_words(comm, folder):
    rate = 0.05 if comm.rank else np.float64(0.05)
    how = {"loss": NamedByItself(), "optimizer": lambda p: torch.optim.SGD(p, lr=rate)}
    with made(folder, **how) as trainer:
        assert trainer.parts.config.own.loss == "NamedByItself"
