"""Modules, data and losses that ``mpitrain.Trainer`` refuses, on all ranks at once."""

from functools import partial

import pytest
import torch
from mpi4py import MPI

from mpitrain.config import Config, ConfigError, Optim
from mpitrain.data import DataError
from tests.mpi.mpitrain.drawn_features import CASES
from tests.mpi.mpitrain.fits import OPTIMIZERS, RANKS, Quadrants, Turns, Waves, made, net, regular
from tests.zoo.parts import Of

pytestmark = pytest.mark.at_most(5)


class Other(Waves):
    """Another form of one sample; labels are 0 or 1."""

    def __init__(self, other, at=37):
        super().__init__(100, 1)
        self.other, self.at = other, at

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y = (y > 0).to(y)
        return self.other(x, y) if index == self.at else (x, y)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Turns(100, 1))


def torn(x, y):
    """The last rank cannot read it."""
    if MPI.COMM_WORLD.rank == RANKS - 1:
        raise OSError("bad sector")
    return x, y


def wider(x, y):
    return torch.cat([x, x]), y


class Classes(Waves):
    """Labels 1, and one that nothing leaves out."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0], torch.tensor(-1 if index == 5 else 1)


def added(more):
    """Something beside the outputs."""
    return torch.nn.Sequential(net(), Of(lambda m, y: {"y": y, "more": more(y)}))


lr_scheduler, adamw, sgd = torch.optim.lr_scheduler, OPTIMIZERS["groups"], OPTIMIZERS["SGD"]


class ByNorm(lr_scheduler.LRScheduler):
    """Reads a parameter, of which only training knows the values."""

    def get_lr(self):
        first = self.optimizer.param_groups[0]["params"][0]
        return [rate / float(first.norm()) for rate in self.base_lrs]


ONE = [torch.nn.Parameter(torch.ones(1))]
ALONE = {"test_data": None, "metrics": None}
CLASSES = ALONE | {"train_data": Classes(48, 1), "loss": torch.nn.CrossEntropyLoss()}


class Squeezes(torch.nn.Linear):
    """Drops the axis of one sample."""

    def forward(self, x):
        return super().forward(x).squeeze()


def hooked(parameters):
    """Optimiser of parameters, one of which has a hook on its gradient by now."""
    parameters = list(parameters)
    parameters[0].register_hook(lambda gradient: 2 * gradient)
    return sgd(parameters)


def near(outputs, labels):
    return ((outputs - labels).abs() < 1).double().mean()


FOLLOWS = {"optimizer": sgd, "schedule": partial(lr_scheduler.ReduceLROnPlateau, mode="max")}
ONES = [(torch.full((6,), float(n)), torch.ones(())) for n in range(9)]
BAD_DATA = [
    ({"train_data": Other(lambda x, y: (x, y, 1.0))} | ALONE,
     r"'0': float64 of shape .* that of sample \d+ float64 of shape"),
    ({"train_data": [1, 2, 3]}, r"sample 0 of list is a int; a pair is needed"),
    ({"train_data": []}, "train_data has no samples"),
    ({"train_data": Endless()}, "train_data has no length"),
    ({"train_data": Turns(100, 1), "workers": 2}, "each process would read all of train_data"),
    # Sample of the last rank's first part of an epoch; the digest reads 8.
    ({"train_data": Turns(100, 1, wrong=(RANKS - 1, 23))},
     "sample 23 of Turns cannot be read: OSError"),
    (CLASSES | {"train_data": Quadrants(48, 1), "model": lambda: net(2)},
     "or floating-point numbers where they are no classes"),
    (CLASSES | {"model": lambda: net(3)},
     r"sample 5 to train on has the label -1, .*ignore_index"),
    ({"test_data": Quadrants(30, 2)}, "train_data has labels of float64, shape"),
    ({"train_data": (torch.ones(40, 6),) * 2}, r"list\(zip\(inputs, labels\)\)"),
]  # fmt: skip
BAD_TYPES = [
    ({"batchsize": 4}, "batchsize is no setting of a job; did you mean batch_size?"),
    ({"train_data": None}, "test_data without train_data"),
    ({"comm": MPI.COMM_NULL}, "comm: expected the ranks"),
    ({"config": "job.toml"}, r"config is a str, .* as of mpitrain\.config\.load"),
]
BAD_JOBS = [
    ({"model": lambda: net(3)}, r"loss: mse_loss cannot compare outputs of shape \(3,\) with"),
    ({"loss": lambda y, t: (y - t) ** 2},
     r"loss: <lambda> gives a tensor of shape \(2, 1\); a loss is one number"),
    ({"loss": lambda y, t: y.sub_(t).square().mean()}, r"work on outputs\.clone"),
    ({"loss": lambda y, t: torch.nn.Tanh().seen}, "return what it reads from the"),
    ({"metrics": {"loss": max}}, "'loss' is the name of the mean loss.*choose an"),
    ({"metrics": ["accuracy"]}, "evaluate.metrics: labels are numbers, and acc"),
    ({"model": lambda: net().requires_grad_(False)}, "all of its parameters are frozen.*unfreeze"),
    *(({"model": partial(added, more)} | ALONE, message) for more, message in (
        (lambda y: y.new_ones(3), "its output 'more' has 3 rows for 2 samples; give one"),
        (lambda y: torch.autograd.grad(y.sum(), y)[0], r"it under torch.enable_grad\(\)"))),
    ({"model": torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(5, 1))},
     "model: layer part1: it cannot take a sample of shape"),
    ({"model": torch.nn.Sequential()}, "model: it has no layers"),
    ({"model": "resnet"}, "type str; the name of a kind is model={'kind': 'res"),
    ({"model": Waves}, r"Waves needs .*'samples'.*; give model=Waves\(\.\.\.\)"),
    (ALONE | {"model": lambda: Squeezes(6, 1), "train_data": ONES, "batch_size": RANKS},
     r"shape \(\) for 1 sample; the first axis must be the samples.*squeeze\(-1\)"),
    ({"model": regular, "optimizer": hooked}, "was given a hook on its gradient"),
    ({"schedule": lambda step: 3 - step}, "the function gives -1 at step 4"),
    (FOLLOWS | {"metrics": {"near": near}}, "mode = 'max', and a lower loss, which evaluate.watch"),
    (FOLLOWS | {"watch": "far"}, r"evaluate\.watch: no test measures 'far'"),
    (FOLLOWS | ALONE, "follows tests, and the job has nothing to test on"),
    ({"optimizer": sgd, "schedule": lambda o: lr_scheduler.StepLR(o, 5), "watch": "mae"},
     r"evaluate\.watch: neither patience nor the schedule"),
    ({"schedule": abs, "optim": {"schedule": "cosine"}},
     r"optim\.schedule: a schedule of one's own takes the place of schedule = 'cosine'"),
    *((ALONE | changed, f"^{named}: this goes by tests, and the job has nothing to")
      for named, changed in {
        "metrics": {"metrics": {"mae": torch.nn.functional.l1_loss}},
        "evaluate.metrics": {"metrics": ["accuracy"]},
        "checkpoint.best": {"checkpoint": {"best": "loss"}},
        "evaluate.patience, evaluate.watch": {"evaluate": {"patience": 2, "watch": "mae"}},
        "evaluate.every": {"evaluate": {"every": 2}}}.items()),
    ({"optimizer": sgd, "config": Config(optim=Optim(weight_decay=0.1))},
     r"optim\.weight_decay: the optimizer"),
    ({"smoothing": 0.1}, r"loss\.smoothing: the loss that the program brings"),
    ({"test_fraction": 0.5}, r"test_fraction: the data that the program brings \(Waves\)"),
    ({"optimizer": CASES["Adafactor"][0], "parallel": {"zero": 2}},
     r"whole parameters, and parallel\.zero cuts them"),
]  # fmt: skip
BAD = [
    (changed, error, message)
    for error, rows in ((DataError, BAD_DATA), (TypeError, BAD_TYPES), (ConfigError, BAD_JOBS))
    for changed, message in rows
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD)
def test_bad_input_is_one_sentence_on_all_ranks(comm, folder, changed, error, message):
    with pytest.raises(error, match=message), made(folder, **changed) as trainer:
        trainer.fit()


SCHEDULES = [
    (adamw, ByNorm, "^schedule: called with the optimiser, it fails: .*parameters have no values"),
    (adamw, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5), "has no value for step 6"),
    (adamw, lambda o: lr_scheduler.StepLR(sgd(ONE), 2), "another"),
    (adamw, lambda o: [lr_scheduler.StepLR(o, 2)], "it gives a list"),
    (adamw, lambda o: lr_scheduler.StepLR(o, "two"), "schedule: "),
    (adamw, lambda o: lr_scheduler.LambdaLR(o, lambda s: 5 - s), "group 0 is -0.003 at step 6"),
    ("adam", lambda o: lr_scheduler.StepLR(o, 2), "with optimizer= of torch"),
    (adamw, lr_scheduler.StepLR(sgd(ONE), 2), "give a function"),
    (sgd(ONE), None, "give a function that makes it"),
    (lambda p: [sgd(p[:1]), sgd(p[1:])], None, r"gives a list.*examples/pytorch/gan\.py"),
]


@pytest.mark.parametrize(("optimizer", "schedule", "why"), SCHEDULES)
def test_schedules_that_cannot_be_are_refused(folder, optimizer, schedule, why):
    with pytest.raises(ConfigError, match=why):
        made(folder, optimizer=optimizer, schedule=schedule)


#: Settings of the first rank (0), and of the others (1).
OTHER_JOBS = [
    (lambda r: {"epochs": 1 + r}, ConfigError, "jobs: train.epochs is 1 on rank 0 and 2 on"),
    (lambda r: {"batch_size": 24 - r}, ConfigError, "jobs: train.batch_size is 24 on rank 0"),
    (lambda r: {"optimizer": partial(torch.optim.SGD, lr=0.1 * (1 + r))},
     ConfigError, "jobs: optim.lr is 0.1 on rank 0 and 0.2 on rank"),
    (lambda r: {"optimizer": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1 * r)},
     ConfigError, "jobs: weight_decay of the optimizer's group 0 is 0 on rank 0 and 0.1"),
    (lambda r: {"model": lambda: torch.nn.Sequential(torch.nn.Dropout(r / 2), net())}, ConfigError,
     r"jobs: model\.0 is 'Dropout\(p=0.0, inplace=False\)' on rank 0 and 'Dropout\(p=0.5"),
    (lambda r: {"test_data": None} if r else {}, ConfigError, "jobs: test_data is True on"),
    (lambda r: {"nonsense": 1} if r else {}, TypeError, r"is no setting of a job.*\(rank 1 of"),
    (lambda r: {"train_data": Turns(100, r)}, DataError, "the ranks have different data"),
    (lambda r: {"batch_size": 1 - r}, ConfigError, r"train.batch_size.*\(rank 1 of"),
]  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("own", "error", "message"), OTHER_JOBS)
def test_ranks_that_ask_for_other_jobs_are_told(comm, folder, own, error, message):
    with pytest.raises(error, match=message):
        made(folder, **own(min(comm.rank, 1)))


PIPE = {"parallel": {"pipe": RANKS} if RANKS in (2, 3, 4) else {}}
AT = 4 * (RANKS - 1) + 1
SOUND = Other(None, -1)
ONE_BY_ONE = {"batch_size": RANKS}
BINARY = {"loss": "binary_cross_entropy", "batch_size": 4, "train_data": SOUND, "test_data": SOUND}
TORN = "sample {} of Other cannot be read: OSError: bad sector"
LABEL = r"sample {} to {} on has the label -1\.0, and binary_cross_entropy takes"


def below(x, y):
    return x, y - 1 - y


@pytest.mark.parametrize(
    ("part", "at", "other", "message", "given"),
    [
        ("train", 37, torn, TORN, PIPE | {"workers": 2}),
        ("test", AT, torn, TORN, PIPE | {"workers": 1, "batch_size": 4}),
        ("test", AT, below, LABEL, BINARY),
        ("test", 37, wider, "all must be alike", ONE_BY_ONE),
    ],
)
def test_a_sample_that_cannot_be_ends_all(comm, folder, part, at, other, message, given):
    given = given | {f"{part}_data": Other(other, at), "epochs": 3}  # an epoch leaves some out
    with pytest.raises(DataError, match=message.format(at, part)), made(folder, **given) as trainer:
        trainer.fit()


def early():
    """Its code leaves out a block for some samples."""

    def forward(module, x):
        for block in module.blocks:
            x = block(x).tanh()
            if float(x.detach().mean()) > 0:
                break
        return module.head(x)

    blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
    return Of(forward, blocks=blocks, head=torch.nn.Linear(6, 1))


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(RANKS % 2 == 1, reason="stages have equally many replicas")
def test_a_part_that_is_left_by_another_way_is_told_on_all_ranks(comm, folder):
    given = dict(model=early, cuts=["blocks.0", "blocks.1"], parallel={"pipe": 2}, steps=30)
    with pytest.raises(ConfigError, match="leaves by another way than in the trial, not behind"):
        made(folder, **given).fit()


def by_kind(**options):
    """A norm for each kind of sample, of which the code calls one, by the first of its samples."""
    norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(6, **options) for _ in range(2))
    return Of(lambda m, x: m.b(m.norms[int(x[0, 0] > 0)](x)), norms=norms, b=net())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{}, {"affine": False, "track_running_stats": False}])
def test_replicas_that_call_different_norms_are_told(comm, folder, options):
    with pytest.raises(ConfigError, match="replicas call different batch norms at the same time"):
        made(folder, model=lambda: by_kind(**options), steps=30).fit()


class Draws(torch.nn.Linear):
    """Draws random numbers after some calls on one rank."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 5 and MPI.COMM_WORLD.rank == RANKS - 1:
            x = torch.poisson(x.abs())
        return super().forward(x)


def test_numbers_that_one_rank_draws_later_are_an_error_of_all_ranks(comm, folder):
    def model():
        layers = [torch.nn.Linear(6, 16), *(torch.nn.Linear(16, 16) for _ in range(RANKS))]
        return torch.nn.Sequential(*layers, Draws(16, 16), torch.nn.Linear(16, 1))

    with pytest.raises(ConfigError, match="draws random numbers") as raised:
        made(folder, model=model, parallel={"pipe": RANKS}, shadow=8).fit()
    assert len(set(comm.allgather(str(raised.value)))) == 1


def tied():
    """Two layers with one weight, which lie on two stages."""
    linear = torch.nn.Linear
    parts = linear(6, 16), linear(16, 16), torch.nn.Tanh(), linear(16, 16), linear(16, 1)
    module = torch.nn.Sequential(*parts)
    module[3].weight = module[1].weight
    return module


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compress": {"codec": "signum"}}, "compress.codec: signum has no sums, and part1.weight"),
        ({"sync": {"combine": "adasum"}}, "sync.combine: adasum is no sum, and part1.weight"),
    ],
)
def test_a_tensor_of_two_stages_has_no_vote_and_no_adasum(comm, folder, changed, message):
    """The stages that hold the tensor refuse it, and so do those between them."""
    with pytest.raises(ConfigError, match=message) as raised:
        made(folder, model=tied, parallel={"pipe": RANKS}, **changed)
    assert len(set(comm.allgather(str(raised.value)))) == 1
    made(folder, model=tied, parallel={"pipe": RANKS}).close()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_begin_in_other_ways_are_told(comm, folder):
    with made(folder, epochs=1) as trainer:
        with pytest.raises(ConfigError, match=r"fit\(resume\) is True on rank 0 and False on"):
            trainer.fit(resume=comm.rank == 0)
        trainer.fit()
