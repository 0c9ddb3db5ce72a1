"""Modules and data sets of torch, the job that trains them, and torch's own loop beside it."""

import random

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpitrain
from mpitrain.fields import fields

RANKS = MPI.COMM_WORLD.size
mse = torch.nn.functional.mse_loss


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


class Turns(torch.utils.data.IterableDataset):
    """Waves, to be read in turn; at ``wrong`` is the rank and number of what cannot be."""

    def __init__(self, samples, seed, wrong=(-1, -1)):
        self.waves, self.wrong = Waves(samples, seed), wrong

    def __len__(self):
        return len(self.waves)

    def __iter__(self):
        for number in range(len(self)):
            if (MPI.COMM_WORLD.rank, number) == self.wrong:
                raise OSError("the line is cut")
            yield self.waves[number]


class Quadrants(Waves):
    """In which quadrant the first two lie."""

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        return x.numpy(), int(x[0] > 0) + 2 * int(x[1] > 0)


def net(outputs=1):
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    return torch.nn.Sequential(linear(6, 16), tanh(), linear(16, 16), tanh(), linear(16, outputs))


def regular():
    """With dropout and batch norm, in and outside of a part of the Sequential."""
    nn = torch.nn
    first = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)
    inner = nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None), nn.Dropout(0.2)
    return nn.Sequential(*first, nn.Sequential(*inner), nn.Linear(16, 1))


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


WHOLE = {"model": Whole, "cuts": ["enter", "blocks.0", "blocks.1"]}


def made(folder, comm=None, **changed):
    given = {
        "model": net, "train_data": Waves(100, 1), "test_data": Waves(30, 2), "loss": mse,
        "metrics": {"mae": lambda y, t: (y - t).abs().mean(), "n": lambda y, t: (t.sum(), len(t))},
        "optim": {"name": "adam", "lr": 0.01, "reference_batch": 0}, "batch_size": 24, "epochs": 2,
        "seed": 7, "dtype": "float64", "shadow": 0, "dir": str(folder / "run"),
    }  # fmt: skip
    if "optimizer" in changed:
        del given["optim"]
    if changed.get("dtype", "float64") is None:
        del given["dtype"], changed["dtype"]
    if hasattr(changed.get("train_data"), "batch_sampler"):
        del given["batch_size"]
    return mpitrain.Trainer(comm, **(given | changed))


#: A layout with stages where the ranks can make some.
PARALLEL = {"pipe": RANKS} if RANKS in (2, 3) else {"zero": 2}
if RANKS == 4:
    PARALLEL = {"pipe": 2, "schedule": "zero_bubble"}


def assert_as_alone(tests, module, alone, rtol=1e-9):
    """Tests as in one process, and the values of the module, which may be left out."""
    expected, other = alone
    for found, wanted in zip(tests, expected, strict=True):
        assert found.test_loss == pytest.approx(wanted.test_loss, rel=rtol)
        assert found.metrics == pytest.approx(wanted.metrics, rel=rtol)
    found, wanted = module.state_dict(), other.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, atol=1e-8, err_msg=name)


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
    assert_equal(trainer.module, module)


def assert_equal(module, other):
    """Bit by bit, running values and all."""
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def assert_alike(module, other, rtol=1e-6, atol=1e-7):
    for found, wanted in zip(module.parameters(), other.parameters(), strict=True):
        np.testing.assert_allclose(found.detach(), wanted.detach(), rtol=rtol, atol=atol)


def in_groups(parameters):
    """No decay of what has one axis, and another rate for one tensor."""
    rest = [p for p in parameters if p.ndim > 1]
    groups = [
        {"params": rest[1:], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        {"params": rest[:1], "weight_decay": 0.2, "lr": 1e-4, "betas": (0.5, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, amsgrad=True)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.3),
    "groups": in_groups,
}


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
    cross_entropy = torch.nn.functional.cross_entropy(outputs["first"], first)
    return mse(outputs["value"], value) + 0.1 * cross_entropy


SEVERAL = {
    "model": Reader,
    "train_data": Sentences(50, 1),
    "test_data": Sentences(30, 2),
    "loss": of_both,
    "cuts": ["of_x", "drop", "mix"],
    "metrics": {"hits": lambda y, t: (y["first"].argmax(1) == t[1]).double().mean()},
}


def tensors(part):
    """Inputs or labels as torch takes them: a tensor, or tensors by name."""
    if part.dtype.names is None:
        return torch.from_numpy(part)
    return {name: torch.from_numpy(values) for name, values in fields(part).items()}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def loop(module, factory, batches, loss):
    """Losses of torch's own loop, each the ``loss(module, batch)`` before a step."""
    optimizer, losses = factory(list(module.parameters())), []
    for batch in batches:
        optimizer.zero_grad()
        found = loss(module, batch)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def torchs_own(
    trainer, factory, schedule=cosine, make=net, loss=mse, dtype=torch.float64, see=None, test=None
):
    """A module that torch trained on the same samples in the same order, and its rates.

    ``see`` has the module after each step, and ``test`` after each epoch: the scheduler takes its
    number, or without it a step each step.
    """
    torch.manual_seed(7)
    module = make().to(dtype)
    optimizer = factory(list(module.parameters()))
    scheduler = schedule(optimizer) if schedule else None
    rates = []
    for epoch in range(trainer.config.train.epochs):
        for batch in trainer.parts.sampler.batches(epoch):
            some = trainer.parts.data.train.in_epoch(epoch)[batch]
            optimizer.zero_grad()
            loss(module(tensors(some.inputs)), tensors(some.labels)).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if see:
                see(module)
            if scheduler and not test:
                scheduler.step()
        if test:
            scheduler.step(test(module))
    return module, rates
