"""Drawn modules of which the loss uses now this and now that, and torch's loops beside them.

A loop has the whole batch, or workers that meet now and then.
"""

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import pytest

from mpitrain.config import ConfigError
from mpitrain.config.sync import parse_outer
from mpitrain.group import share
from tests.mpi.mpitrain.fits import RANKS, made

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
WIDTH = 6


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
        tied: the last branch has the weight of the first.
        whole: the module is no Sequential.
        special: numbers of the samples of each kind.
        samples, batch_size, micro_batches: of training.
        optimizer: keys of [optim].
        own: the job makes the optimiser, and not torch.
        settings: other tables.
    """

    trees: tuple
    tied: bool
    whole: bool
    special: tuple
    samples: int
    batch_size: int
    micro_batches: int
    optimizer: dict
    own: bool
    settings: dict = field(default_factory=dict)

    def model(self):
        branches = [Branch(tree) for tree in self.trees]
        if self.tied:
            branches[-1].linear.weight = branches[0].linear.weight
        parts = torch.nn.Sequential(Enter(), *branches, Leave())
        return (Whole(parts) if self.whole else parts).double()  # all bits of the trainer's

    def begin(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return self.model()

    def data(self):
        return Turns(self.samples, 1, self.special)

    def torchs(self, parameters):
        """The optimiser of torch."""
        found = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        options = {k: v for k, v in self.optimizer.items() if k in _OF_TORCH}
        return found[self.optimizer["name"]](parameters, **options)

    def given(self):
        """Arguments of the trainer."""
        optim = dict(self.optimizer)
        if self.own:
            given = {"optim": optim | {"reference_batch": 0}}
        else:
            beside = {k: optim[k] for k in ("clip_norm", "average")}
            given = {"optimizer": self.torchs, "optim": beside}
        given |= {"model": self.model, "loss": of_one, "metrics": None, "test_data": None}
        given |= {"train_data": self.data(), "batch_size": self.batch_size, "epochs": 1}
        return given | self.settings | {"micro_batches": self.micro_batches}

    def trainer(self, folder, comm=None, **changed):
        return made(folder, comm, **self.given() | changed)

    # -- what is promised

    @property
    def sync(self):
        return {"kind": "every_step", "start": 0, "period": 50} | self.settings.get("sync", {})

    @property
    def coded(self):
        """A code of each step's gradients, which sends later what it keeps back; none of a
        gradient that a node shares, as there is one node."""
        shared = self.settings.get("parallel", {}).get("node_shared", False)
        return "compress" in self.settings and self.sync["kind"] == "every_step" and not shared

    @property
    def workers(self):
        return RANKS // self.settings.get("parallel", {}).get("pipe", 1)

    @property
    def has_twin(self):
        """Whether torch's own loop ends with the same numbers."""
        sync = self.sync
        late = sync["kind"] == "delayed" or sync.get("delay") or sync.get("fragments", 1) > 1
        other = sync.get("combine", "mean") != "mean" or sync.get("state", "own") != "own"
        return (
            self.optimizer["name"] not in ("lamb", "lars")
            and "compress" not in self.settings
            and not late
            and not other
        )


_OF_TORCH = ("lr", "momentum", "nesterov", "weight_decay")


class Twins:
    """Workers of torch alone, in one process; in each step they do as the trainer promises.

    Attributes:
        left_out: of each worker, in how many steps it had no use for a parameter.
    """

    def __init__(self, case):
        self.case, self.begin = case, case.begin()
        self.workers = [case.begin() for _ in range(case.workers)]
        optimizer = case.torchs if case.has_twin else torch.optim.SGD
        self.optimizers = [optimizer(list(one.parameters())) for one in self.workers]
        self.averages = [deepcopy(one) for one in self.workers]
        self.anchor = deepcopy(self.begin)
        kind, outer = parse_outer(case.sync.get("outer", "plain"))
        options = {"lr": outer.lr, "momentum": outer.momentum, "nesterov": kind == "nesterov"}
        self.outer = torch.optim.SGD(self.anchor.parameters(), **options)
        self.left_out = [{} for _ in self.workers]
        batches = torch.utils.data.DataLoader(case.data(), case.batch_size)
        for step, batch in enumerate(batches):
            self._step(step, batch)

    def _step(self, step, batch):
        sync = self.case.sync
        for number, one in enumerate(self.workers):
            self._backward(number, one, batch)
        together = sync["kind"] == "every_step" or step < sync["start"]
        if together:
            for copies in zip(*(one.parameters() for one in self.workers), strict=True):
                found = [p.grad for p in copies if p.grad is not None]
                for p in copies:
                    p.grad = sum(found) / len(copies) if found else None
        for number, one in enumerate(self.workers):
            self._update(number, one, step)
        if not together and (step + 1 - sync["start"]) % sync["period"] == 0:
            self._meet()
        elif together:
            self.anchor.load_state_dict(self.workers[0].state_dict())

    def _backward(self, number, module, batch):
        """Gradients of a worker's micro-batches, times the number of workers."""
        (x, special), y = batch
        count, parts = len(self.workers), self.case.micro_batches * len(self.workers)
        module.zero_grad()
        for part in range(number, parts, count):
            own = share(len(x), part, parts)
            if len(x[own]):
                given = (x[own], special[own])
                outputs = module(*given) if self.case.whole else module(given)
                (of_one(outputs, y[own]) * (count * len(x[own]) / len(x))).backward()

    def _update(self, number, module, step):
        case, counts = self.case, self.left_out[number]
        for name, p in module.named_parameters():
            # A code sends later what it has kept back.
            if p.grad is None and (not case.coded or counts.get(name, 0) == step):
                counts[name] = counts.get(name, 0) + 1
        own = [p.grad for p in module.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in own]).norm().item() if own else 0.0
        for gradient in own if 0 < case.optimizer["clip_norm"] < norm else ():
            gradient *= min(1.0, case.optimizer["clip_norm"] / (norm + 1e-6))
        self.optimizers[number].step()
        keeps = case.optimizer["average"]
        for mean, p in zip(self.averages[number].parameters(), module.parameters(), strict=True):
            mean.data += (1 - keeps) * (p.data - mean.data)

    def _meet(self):
        """The anchor goes the workers' mean way, and they go on from there."""
        for p, mean in zip(self.anchor.parameters(), _means(self.workers), strict=True):
            p.grad = p.data - mean
        self.outer.step()
        for one in self.workers:
            one.load_state_dict(self.anchor.state_dict())

    def end(self):
        """Values that tests use and the trained module has."""
        found = deepcopy(self.begin)
        averaged = self.averages if self.case.optimizer["average"] else self.workers
        for p, mean in zip(found.parameters(), _means(averaged), strict=True):
            p.data.copy_(mean)
        return found.state_dict()

    def never_used(self):
        """Names of the parameters that no worker has ever used."""
        steps = -(-self.case.samples // self.case.batch_size)
        counts = [{n for n, c in own.items() if c == steps} for own in self.left_out]
        return set.intersection(*counts)


def _means(modules):
    every = zip(*(one.parameters() for one in modules), strict=True)
    return [torch.stack([p.data for p in copies]).mean(0) for copies in every]


def check(case, comm, folder):
    """The trainer does as the twins.  Gives back why it has refused, if it has; collective."""
    try:
        with case.trainer(folder) as trainer:
            trainer.fit()
            left_out = dict(trainer.parts.updater.left_out)
    except ConfigError as error:
        return str(error)
    found = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    whole = np.concatenate([value.numpy().ravel() for value in found.values()])
    every = comm.allgather((left_out, whole))  # before anything that one rank alone may find
    assert np.isfinite(whole).all()
    assert all(np.array_equal(whole, other) for _, other in every), "ranks differ"
    twins, begin = Twins(case), case.begin().state_dict()
    for name in twins.never_used():
        assert torch.equal(found[name], begin[name]), f"{name} has moved"
    if case.workers < RANKS:  # each stage has its own
        left_out = {name: steps for part, _ in every for name, steps in part.items()}
    own = twins.left_out[comm.rank if case.workers == RANKS else 0]
    assert left_out == {trainer.parts.objects.names[name]: steps for name, steps in own.items()}
    if case.has_twin:
        for name, value in twins.end().items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
    return ""
