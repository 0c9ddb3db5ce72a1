"""Modules of which the loss uses now this and now that, and torch's own loop beside them."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.mpi.mpitrain.fits import made

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
WIDTH = 6
RATE, DECAY = 0.01, 0.3


class Turns(torch.utils.data.IterableDataset):
    """Points of a surface in a fixed order, with a flag for each kind of special ones."""

    def __init__(self, samples, seed, special):
        self.samples, self.seed, self.special = samples, seed, special

    def __len__(self):
        return self.samples

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed)
        for number in range(self.samples):
            x = torch.rand(6, generator=draw).double() * 4 - 2
            special = torch.tensor([number in kind for kind in self.special]).double()
            yield (x, special), (torch.sin(x[0]) * x[1] + x[2])[None]


def of_one(outputs, labels):
    return torch.nn.functional.mse_loss(outputs["y"], labels)


class Enter(torch.nn.Module):
    """Values, what the loss leaves out, and whether a sample is special: branches pass them on."""

    def __init__(self):
        super().__init__()
        self.linear, self.aside = torch.nn.Linear(6, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        x, special = given
        x = torch.tanh(self.linear(x))
        return x, self.aside(x), special


class Branch(torch.nn.Module):
    """A linear layer and the branches behind it.

    It is used ``always``, ``never``, ``aside``, so that the loss leaves its values out, or where
    a sample is special, of the kind ``use``.
    """

    def __init__(self, tree):
        super().__init__()
        self.use, behind = tree
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.behind = torch.nn.Sequential(*map(Branch, behind))

    def forward(self, given):
        x, aside, special = given
        if self.use == "never":
            return given
        flag = special[:, [self.use]] if isinstance(self.use, int) else None
        if flag is not None and not bool((flag > 0).any()):
            return given
        y, more, _ = self.behind((torch.tanh(self.linear(x)), aside, special))
        if self.use == "aside":
            return x, more + y, special
        if flag is None:
            return x + y, more, special
        return x + flag * y, aside + flag * (more - aside), special


class Leave(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 1)

    def forward(self, given):
        x, aside, _ = given
        return {"y": self.linear(x), "aside": aside}


class Whole(torch.nn.Module):
    """All parts as one, which cannot be cut."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, special):
        return self.parts((x, special))


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        trees: of each branch when it is used, and the branches behind it.
        whole: the module is no Sequential.
        special: numbers of the samples of each kind.
        samples, batch_size, micro_batches: of training.
        own: the job makes the optimiser, and not torch.
        settings: other tables.
    """

    trees: tuple
    whole: bool
    special: tuple
    samples: int
    batch_size: int
    micro_batches: int
    own: bool
    settings: dict = field(default_factory=dict)

    def model(self):
        parts = torch.nn.Sequential(Enter(), *map(Branch, self.trees), Leave())
        return (Whole(parts) if self.whole else parts).double()  # all bits of the trainer's

    def begin(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return self.model()

    def data(self):
        return Turns(self.samples, 1, self.special)

    def torchs(self, parameters):
        """The optimiser of torch."""
        return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)

    def given(self):
        """Arguments of the trainer."""
        if self.own:
            optim = {"name": "adamw", "lr": RATE, "weight_decay": DECAY, "reference_batch": 0}
            given = {"optim": optim}
        else:
            given = {"optimizer": self.torchs}
        given |= {"model": self.model, "loss": of_one, "metrics": None, "test_data": None}
        given |= {"train_data": self.data(), "batch_size": self.batch_size, "epochs": 1}
        return given | self.settings | {"micro_batches": self.micro_batches}

    def trainer(self, folder, comm=None, **changed):
        return made(folder, comm, **self.given() | changed)


def twin(case):
    """The module that torch has trained, and in how many steps it had no use for a parameter."""
    module, left_out = case.begin(), {}
    optimizer = case.torchs(module.parameters())
    for (x, special), y in torch.utils.data.DataLoader(case.data(), case.batch_size):
        optimizer.zero_grad()
        of_one(module(x, special) if case.whole else module((x, special)), y).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                left_out[name] = left_out.get(name, 0) + 1
        optimizer.step()
    return module, left_out


def check(case, comm, folder):
    """The trainer does as torch's loop; collective."""
    with case.trainer(folder) as trainer:
        trainer.fit()
        left_out = dict(trainer.parts.updater.left_out)
    found = trainer.module.state_dict()
    whole = np.concatenate([value.numpy().ravel() for value in found.values()])
    every = comm.allgather((left_out, whole))  # before anything that one rank alone may find
    assert np.isfinite(whole).all()
    assert all(np.array_equal(whole, other) for _, other in every), "ranks differ"
    module, steps = twin(case)
    left_out = {name: count for part, _ in every for name, count in part.items()}
    assert left_out == {trainer.parts.objects.names[name]: count for name, count in steps.items()}
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
