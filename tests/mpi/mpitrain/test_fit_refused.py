"""Modules, data and losses that ``mpitrain.Trainer`` refuses, on all ranks at once."""

import pytest
from mpi4py import MPI

from mpitrain import nn, train
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from tests.mpi.mpitrain.fits import RANKS, Quadrants, Waves, Whole, made, net, regular

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]


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
            r"optim\.schedule: a schedule of one's own takes the place of schedule = 'cosine'",
        ),
        ({"schedule": "cosine"}, TypeError, "schedule is a key of several tables"),
        ({"batchsize": 4}, TypeError, "batchsize is no setting of a job; did you mean batch_size?"),
        ({"name": "adam"}, TypeError, "key of several tables"),
        (
            {"layers": {"one": nn.ReLU()}},
            ConfigError,
            'layers: this is model.layers, .* give layers of your own as model={"name": layer, ',
        ),
        ({"batch_size": 0}, ConfigError, "train.batch_size"),
        ({"train_data": None}, TypeError, "test_data without train_data"),
        ({"test_data": Quadrants(30, 2)}, DataError, "train_data has labels of float64, shape"),
        ({"comm": net()}, TypeError, "comm: expected the ranks, .*got a Sequential; give a model,"),
        ({"comm": MPI.COMM_NULL}, TypeError, "comm: expected the ranks"),
        ({"config": "job.toml"}, TypeError, r"config is a str, .* as of mpitrain\.config\.load"),
        ({"config": net()}, TypeError, "config is a Sequential"),
        ({"model": "resnet"}, ConfigError, "type str; the name of a kind is model={'kind': 'res"),
        ({"model": Odd}, ConfigError, r"Odd needs .*'samples'\); give model=Odd\(\.\.\.\)"),
        ({"loss": torch.ones(())}, ConfigError, "loss: expected a function of .* got a Tensor"),
        ({"train_data": Waves}, ConfigError, "train_data: expected a data set.* the class Waves"),
        ({"test_data": "digits"}, ConfigError, "test_data: .* got 'digits'"),
        ({"train_data": (torch.ones(40, 6),) * 2}, DataError, r"list\(zip\(inputs, labels\)\)"),
        ({"splits": ["up"]}, ConfigError, "splits: expected ways by names"),
        ({"cuts": 2}, ConfigError, "cuts: expected names of modules, .* got 2"),
        ({"classes": "10"}, ConfigError, "classes: expected how many classes, as 10, got '10'"),
        ({"collate_fn": 3}, ConfigError, "collate_fn: expected a function of a list of samples"),
        (
            {
                "model": lambda: net(3),
                "train_data": Quadrants(100, 1),
                "test_data": Quadrants(30, 2),
                "loss": "cross_entropy",
                "metrics": ["accuracy"],
            },
            DataError,
            r"sample \d+ to train on has the label 3, and labels of 3 classes lie from 0 to 2",
        ),
    ],
)
def test_bad_input_is_one_sentence_on_all_ranks(comm, folder, changed, error, message):
    with pytest.raises(error, match=message), made(folder, **changed) as trainer:
        trainer.fit()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resume": "runs/mine"}, r"fit\(resume\): give True or False, not 'runs/mine'"),
        ({"on_record": "log"}, r"on_record: give a function of a record"),
    ],
)
def test_fit_is_given_other_things(comm, folder, given, message):
    with made(folder, comm) as trainer, pytest.raises(TypeError, match=message):
        with pytest.raises(TypeError, match="go_on: give True or False, not 'yes'"):
            train(trainer, go_on="yes")
        trainer.fit(**given if comm.rank == comm.size - 1 or "resume" in given else {})


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


PIPE = {"pipe": RANKS} if RANKS in (2, 3, 4) else {}


@pytest.mark.parametrize(
    ("part", "at", "workers"),
    [("train", 37, 0), ("train", 37, 2), ("test", 4 * (RANKS - 1) + 1, 1)],
)
def test_a_sample_that_one_rank_cannot_read_ends_all(comm, folder, part, at, workers):
    """Whoever has it; where another rank has it, nobody is disturbed."""
    torn = Torn(100, 1)
    torn.at = at
    data = {f"{part}_data": torn, "batch_size": 24 if part == "train" else 4}
    with (
        pytest.raises(DataError, match=f"sample {at} of Torn cannot be read: OSError: bad sector"),
        made(folder, **data, parallel=PIPE, workers=workers) as trainer,
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


class Wider(Waves):
    """One sample in the middle is wider."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (torch.cat([x, x]) if index == 37 else x), y


@pytest.mark.parametrize("part", ["train_data", "test_data"])
def test_a_sample_of_another_shape_ends_all(comm, folder, part):
    with pytest.raises(DataError, match="all must be alike"):
        made(folder, **{part: Wider(100, 1)}, batch_size=RANKS, epochs=1).fit()


class Held(torch.nn.Module):
    """A function that holds on to a module, beside a norm, for which the module is copied."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), net()
        self.f = lambda x: self.a(x)

    def forward(self, x):
        return self.b(self.norm(self.f(x)))


class Tables(torch.nn.Module):
    """Changes its parameters as it goes forward."""

    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(3, 4, max_norm=0.5), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.table((x[:, 0] > 0).long()))


def hooked():
    module = net()
    module[0].weight.register_hook(lambda g: 2 * g)
    return module


def with_own_norm():
    module = regular()
    usual = module[4][1].forward
    module[4][1].forward = lambda x: usual(x)
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
        ({"model": lambda: Held().double()}, "part0 follows from a.* by another way than its"),
        ({"model": Tables}, "changes its parameters in its forward pass"),
        ({"model": with_own_hook, "cuts": ["enter"]}, "its own hooks belong to no part"),
        ({"model": hooked}, r"0.weight has a hook on its gradient"),
        ({"model": with_own_norm}, "running values that are not those of a BatchNorm around it"),
        ({"model": norm_twice}, r"part2. .BatchNorm1d. is in part0, too"),
        ({"loss": summed}, r"must be a mean over samples with equal weights.*return \(sum, count"),
        ({"loss": rooted}, "must be a mean over samples with equal weights"),
    ],
)
def test_what_would_train_other_numbers_is_refused(comm, folder, changed, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        made(folder, **changed, steps=2).fit()


class Early(torch.nn.Module):
    """Its code leaves out a block for some samples."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
            if float(x.detach().mean()) > 0:
                break
        return self.head(x)


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(RANKS % 2 == 1, reason="stages have equally many replicas")
def test_a_part_that_is_left_by_another_way_is_told_on_all_ranks(comm, folder):
    given = dict(model=Early, cuts=["blocks.0", "blocks.1"], parallel={"pipe": 2}, steps=30)
    with pytest.raises(ConfigError, match="leaves by another way than in the trial, not behind"):
        made(folder, **given).fit()


class ByKind(torch.nn.Module):
    """A norm for each kind of sample, of which the code calls one, by the first of its samples."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(6) for _ in range(2))
        self.b = net()

    def forward(self, x):
        return self.b(self.norms[int(x[0, 0] > 0)](x))


@pytest.mark.mpi(min_size=2)
def test_replicas_that_call_different_norms_are_told(comm, folder):
    with pytest.raises(ConfigError, match="replicas call different batch norms at the same time"):
        made(folder, model=ByKind, steps=30).fit()


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
        if self.how == "counts":
            return self.lin(x) + torch.poisson(x.abs())
        if self.calls > 5 and MPI.COMM_WORLD.rank == RANKS - 1:
            return self.lin(x) + torch.rand(x.shape, dtype=x.dtype)
        return self.lin(x)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mixes", "step 1: the loss is .*: the module gives samples other outputs than in one"),
        ("one row", "cannot take a sample of shape"),
        ("counts", "draws random numbers by torch.ops.aten.poisson; do without, or set run.r"),
        ("later", "draws random numbers"),
    ],
)
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_no_pure_function_is_an_error_of_all_ranks(comm, folder, how, message, zero):
    """All ranks have one message."""

    def model():
        layers = [torch.nn.Linear(6, 16), *(torch.nn.Linear(16, 16) for _ in range(RANKS))]
        return torch.nn.Sequential(*layers, Impure(how), torch.nn.Linear(16, 1))

    parallel = {"zero": zero} if zero else {"pipe": RANKS}
    with pytest.raises(ConfigError, match=message) as raised:
        made(folder, model=model, parallel=parallel).fit()
    assert len(set(comm.allgather(str(raised.value)))) == 1


def tied():
    """Two layers with one weight, which lie on two stages."""
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.Linear(16, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 16),
        torch.nn.Linear(16, 1),
    )
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
