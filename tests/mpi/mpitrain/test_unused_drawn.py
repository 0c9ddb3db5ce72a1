"""Drawn modules of which the loss uses now this and now that, in every way of training.

Beside them are torch's own loops: of the whole batch, or of workers that meet now and then.
"""

import os
import re
import traceback
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mpitrain.compress import Momentum, parse
from mpitrain.compress.table import CODECS
from mpitrain.config import ConfigError
from mpitrain.config.sync import parse_outer
from mpitrain.group import share
from tests.mpi.mpitrain.test_fit import RANKS, made
from tests.mpi.mpitrain.test_unused import Turns, of_one

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]
WIDTH = 6
#: Drawn examples of a quick and a slow test; ``SWEEPS`` as for drawn moments of faults.
FEW, MANY = 3, 10 * int(os.environ.get("SWEEPS", "3"))


class Enter(torch.nn.Module):
    """What branches pass on: values, what the loss leaves out, and whether a sample is special."""

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

    def trainer(self, folder, comm=None, **changed):
        optim = dict(self.optimizer)
        if self.own:
            given = {"optim": optim | {"reference_batch": 0}}
        else:
            beside = {k: optim[k] for k in ("clip_norm", "average")}
            given = {"optimizer": self.torchs, "optim": beside}
        given |= {"model": self.model, "loss": of_one, "metrics": None, "test_data": None}
        given |= {"train_data": self.data(), "batch_size": self.batch_size, "epochs": 1}
        train = {"micro_batches": self.micro_batches}
        return made(folder, comm, **given | self.settings | train | changed)

    # -- what is promised

    @property
    def sync(self):
        return {"kind": "every_step", "start": 0, "period": 50} | self.settings.get("sync", {})

    @property
    def coded(self):
        """A code of each step's gradients, which sends later what it keeps back."""
        return "compress" in self.settings and self.sync["kind"] == "every_step"

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
        """Of a worker's micro-batches, as many times larger as there are workers."""
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
            # What a code has kept back comes later.
            if p.grad is None and (not case.coded or counts.get(name, 0) == step):
                counts[name] = counts.get(name, 0) + 1
        own = [p.grad for p in module.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in own]).norm().item() if own else 0.0
        for gradient in own if 0 < case.optimizer["clip_norm"] < norm else ():
            gradient *= case.optimizer["clip_norm"] / norm
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
        """What tests and the trained module have."""
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


class Pixels(torch.nn.Module):
    """What :class:`Enter` takes, of digits; bright corners are special."""

    def forward(self, x):
        x = x.flatten(1).double()
        return x[:, 26:32], (x[:, [1, 15]] > 0.5).double()


def of_digits(outputs, labels):
    return torch.nn.functional.mse_loss(outputs["y"][:, 0], labels / 10.0)


def check_quorum(case, comm, folder):
    """All of the workers are a quorum that does as every step does; with fewer, what is never used
    and what ranks have in common are the same.  Gives back why it is refused; collective."""
    digits = {"train_data": None, "data": {"name": "digits"}, "loss": of_digits, "steps": 5}
    parts = replace(case, whole=False)
    digits["model"] = lambda: torch.nn.Sequential(Pixels(), *parts.model())
    found = []
    try:
        for sync in ({}, case.settings["sync"]):
            changed = digits | {"sync": sync, "dir": str(folder / str(len(found)))}
            with case.trainer(folder, **changed) as trainer:
                trainer.fit()
                found.append((dict(trainer.parts.updater.left_out), trainer.module.state_dict()))
    except ConfigError as error:
        return str(error)
    (counts, wanted), (left_out, values) = found
    whole = np.concatenate([value.numpy().ravel() for value in values.values()])
    every = comm.allgather(whole)
    assert np.isfinite(whole).all()
    assert all(np.array_equal(whole, other) for other in every), "ranks differ"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        begin = digits["model"]().state_dict()
    for name, known in trainer.parts.objects.names.items():
        if counts.get(known) == 5:
            assert left_out[known] == 5, f"{name} has been used"
            assert torch.equal(values[name], begin[name]), f"{name} has moved"
    if case.sync["quorum"] == 1:
        assert left_out == counts
        for name, value in wanted.items():
            np.testing.assert_allclose(values[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
    return ""


# -- what is drawn

USES = st.sampled_from(["always", "never", "aside", 0, 1, 0, 1])
TREES = st.recursive(
    st.tuples(USES, st.just(())),
    lambda trees: st.tuples(USES, st.lists(trees, max_size=2).map(tuple)),
    max_leaves=4,
)
FLAGS = st.booleans()


@st.composite
def cases(draw, tables):
    """Of any module and optimiser, with what ``tables`` draws."""
    given = draw(tables)
    codec = given.get("compress", {}).get("codec", "none")
    plain = codec in CODECS and isinstance(parse(codec), Momentum)
    own = draw(FLAGS)
    name = "sgd" if plain else draw(st.sampled_from(["sgd", "adam", "adamw", "lamb"]))
    optimizer = {"name": name, "lr": 0.05 if name == "sgd" else 0.01}
    optimizer["weight_decay"] = draw(st.sampled_from([0.0, 0.3]))
    if name == "sgd":
        optimizer["momentum"] = 0.0 if plain else draw(st.sampled_from([0.0, 0.9]))
        optimizer["nesterov"] = optimizer["momentum"] > 0 and draw(FLAGS)
    optimizer["clip_norm"] = draw(st.sampled_from([0.0, 0.5]))
    optimizer["average"] = draw(st.sampled_from([0.0, 0.7]))
    batch_size = draw(st.sampled_from([5, 12, 2]))
    samples = batch_size * draw(st.integers(4, 8)) - draw(st.integers(0, 1))
    special = st.lists(st.integers(0, samples - 1), min_size=1, max_size=4).map(tuple)
    return Case(
        trees=tuple(draw(st.lists(TREES, min_size=1, max_size=4))),
        tied=draw(FLAGS),
        whole="pipe" not in given.get("parallel", {}) and draw(FLAGS),
        special=(draw(special), draw(special)),
        samples=samples,
        batch_size=batch_size,
        micro_batches=draw(st.integers(1, 3)),
        optimizer=optimizer,
        own=own or name == "lamb",
        settings=given,
    )


PARALLEL = {
    "bucket_bytes": st.sampled_from([1, 600, 2**20]),
    "recompute": FLAGS,
    "overlap": FLAGS,
    "checksums": FLAGS,
}
#: Codes of shards: of single numbers, without bias.
OF_SHARDS = ("bf16", "int8:rounding=stochastic", "qsgd", "terngrad")


def coded(codecs):
    return st.fixed_dictionaries(
        {"codec": st.sampled_from(codecs), "least": st.sampled_from([0, 20])},
        optional={"start": st.just(1)},
    )


@st.composite
def of_every_step(draw):
    """Gradients that are summed in each step, as they are or by codes."""
    parallel = draw(st.fixed_dictionaries(PARALLEL)) | {"zero": draw(st.integers(0, 3))}
    if not parallel["zero"]:
        parallel["node_shared"] = draw(FLAGS)
    found = {"parallel": parallel}
    shards = parallel["zero"] > 1 or parallel.get("node_shared")
    match draw(st.sampled_from(["dense", "dense", "coded", "adasum"])):
        case "coded":
            found["compress"] = draw(coded(OF_SHARDS if shards else sorted(CODECS)))
        case "adasum":
            found["sync"] = {"combine": "adasum"}
    return found


@st.composite
def of_pipelines(draw):
    parallel = draw(st.fixed_dictionaries(PARALLEL))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]))
    return {"parallel": parallel | {"pipe": RANKS, "schedule": schedule}}


@st.composite
def of_workers(draw):
    """Workers that train by themselves and meet now and then."""
    kind = draw(st.sampled_from(["local", "local", "delayed"]))
    period = draw(st.integers(1, 3))
    sync = {"kind": kind, "period": period, "start": draw(st.integers(0, 2))}
    sync["agree"] = draw(st.integers(1, 3))
    codes = sorted(CODECS)
    if kind == "delayed":
        sync["delay"] = draw(st.integers(0, 5))
    else:
        sync["outer"] = draw(st.sampled_from(["plain", "momentum:lr=0.01", "nesterov"]))
        sync["state"] = draw(st.sampled_from(["own", "averaged"]))
        if period > 1 and draw(FLAGS):  # the streaming form
            sync |= {"delay": draw(st.integers(1, period - 1)), "state": "own"}
            sync |= {"fragments": draw(st.integers(1, min(3, period)))}
            sync["mix"] = draw(st.sampled_from([0.3, 0.0, 0.5, 0.9]))
    found = {"sync": sync, "parallel": draw(st.fixed_dictionaries(PARALLEL))}
    match draw(st.sampled_from(["dense", "dense", "coded", "adasum"])):
        case "coded":
            found["compress"] = draw(coded(codes))
        case "adasum" if kind == "local":
            sync["combine"] = "adasum"
    return found


def of_quorums():
    quorum = {"quorum": st.sampled_from([1.0, 0.3]), "behind": st.integers(1, 4)}
    sync = st.fixed_dictionaries({"kind": st.just("quorum")} | quorum)
    return st.fixed_dictionaries({"sync": sync})


#: What the trainer may say to a drawn job.
REFUSALS = (
    r"would move each weight by 1",
    r"gives every rank the whole vote",
    r"keeps nothing that drifts apart",
    r"warms up by itself",
    r"may be at most period",
    r"cannot be cut into \d+",
    r"shards of sums|shards alone",
    r"codes are of sums|micro-batch would have its own|is of sums over nodes",
    r"is no sum of nodes' sums",
    r"must be at most \d+",
)
WAYS = {"every step": (of_every_step, check), "workers": (of_workers, check)}
if RANKS > 1:
    WAYS |= {"pipelines": (of_pipelines, check), "quorums": (of_quorums, check_quorum)}


class Drawing:
    """Examples that rank 0 draws and all ranks train.

    Attributes:
        refused: of each example whether the trainer has refused it.
    """

    def __init__(self, comm, folder, check):
        self.comm, self.folder, self._check = comm, folder, check
        self.refused = []

    def run(self, tables, examples):
        """Fails on all ranks with the first case that does; collective."""
        if self.comm.rank:
            while isinstance(case := self.comm.bcast(None), Case):
                self._verdict(case)
            assert case is None, case
            return

        def one_after_the_other(case):
            self.comm.bcast(case)
            if wrong := self._verdict(case):
                pytest.fail(f"{case}\n{wrong}", pytrace=False)

        failed = "rank 0 has ended"
        # Behind the tenth, hypothesis changes earlier ones a little: rounds of ten are more unlike.
        rounds = settings(
            max_examples=min(examples, 10),
            deadline=None,
            database=None,
            phases=[Phase.generate],  # to find smaller ones takes minutes
            suppress_health_check=list(HealthCheck),
        )
        try:
            for number in range(0, examples, 10):
                rounds(seed(number)(given(cases(tables))(one_after_the_other)))()
            failed = None
        except BaseException as error:
            failed = str(error)
            raise
        finally:
            self.comm.bcast(failed)

    def _verdict(self, case):
        """What is wrong on some rank, the same on all; collective."""
        said = wrong = ""
        try:
            said = self._check(case, self.comm, self.folder / str(len(self.refused)))
            assert not said or re.search("|".join(REFUSALS), said), f"it refuses: {said}"
        except Exception:
            wrong = traceback.format_exc()
        self.refused.append(bool(said))
        every = self.comm.allgather((said, wrong))
        if len({said for said, _ in every}) > 1:
            return f"not all ranks refuse it alike: {every}"
        return next((f"rank {rank}: {w}" for rank, (_, w) in enumerate(every) if w), "")


#: A quorum trains twice, on another data set.
QUICK = [(way, FEW) for way in WAYS if way != "quorums"]
SLOW = [pytest.param(way, MANY, marks=pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize(("way", "examples"), QUICK + SLOW)
def test_what_the_loss_leaves_out_is_left_alone(comm, folder, way, examples):
    tables, checked = WAYS[way]
    drawing = Drawing(comm, folder, checked)
    drawing.run(tables(), examples)
    assert sum(drawing.refused) <= len(drawing.refused) / 2, "most examples were refused"
