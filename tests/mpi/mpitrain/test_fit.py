"""``mpitrain.Trainer``: in every layout, a torch module trains as in one process."""

import random

import numpy as np
import pytest

from tests.mpi.mpitrain.fits import (
    CUTS,
    OPTIMIZERS,
    RANKS,
    SEVERAL,
    Block,
    Quadrants,
    Sentences,
    Waves,
    Whole,
    assert_as_alone,
    assert_interrupted_alike,
    layouts,
    made,
    net,
    of_both,
    regular,
    tensors,
)

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]


@pytest.mark.parametrize("parallel", layouts())
def test_every_layout_is_one_process(comm, folder, alone, parallel):
    train_data = Waves(100, 1)
    with made(folder, parallel=parallel, train_data=train_data) as trainer:
        tests = trainer.fit()
    assert [t.epoch for t in tests] == [0, 1]
    assert_as_alone(tests, trainer.module, alone(), rtol=1e-11)
    assert not torch.equal(trainer.module[0].weight, net()[0].weight)
    if not parallel:  # each rank has read its own, and a few for the digest
        assert len(train_data.read) <= 2 * (100 // RANKS + 10) + 20


@pytest.mark.parametrize("parallel", layouts())
def test_dropout_and_batch_norm(comm, folder, alone, parallel):
    with made(folder, model=regular, parallel=parallel) as trainer:
        tests = trainer.fit()
    assert_as_alone(tests, trainer.module, alone(model=regular))
    found = trainer.module.state_dict()
    assert found.keys() == regular().state_dict().keys()
    assert found["1.num_batches_tracked"] == 10
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
        # A bias before a norm has a gradient of rounding, which Adam would make large.
        self.enter, self.leave = torch.nn.Conv2d(1, 4, 2, bias=False), torch.nn.Linear(8, 1)
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
    """The last batch of an epoch has one sample, two for batch norm, and the test has three."""
    changed = {
        "model": lambda: torch.nn.Sequential(
            FIRST[first](), *(torch.nn.Linear(1, 1) for _ in range(RANKS - 1))
        ),
        "train_data": Waves(50 if first == "batch norm" else 49, 1),
        "test_data": Waves(3, 2),
    }
    with made(folder, parallel=parallel, **changed) as trainer:
        tests = trainer.fit()
    assert_as_alone(tests, trainer.module, alone(**changed))


class AlsoUnread(torch.nn.Module):
    """Two results, of which a loss may read one: batch norm of the other goes backward nowhere."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)
        self.leave = torch.nn.Linear(6, 1)

    def forward(self, x):
        y = self.enter(x)
        return self.leave(x), self.norm(torch.stack((y, 2 * y), -1))  # two values of one sample


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


@pytest.mark.parametrize("parallel", layouts())
def test_a_module_that_is_no_sequential(comm, folder, alone, parallel):
    with made(folder, model=Whole, cuts=CUTS, parallel=parallel) as trainer:
        tests = trainer.fit()
    assert_as_alone(tests, trainer.module, alone(model=Whole, cuts=CUTS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        begin = Whole().state_dict()
    frozen = {
        name
        for name, value in trainer.module.state_dict().items()
        if torch.equal(value, begin[name])
    }
    assert frozen == {"blocks.1.up.weight", "blocks.1.up.bias"}


class Woven(Whole):
    """Stages share weights of several blocks, which come in another order on the last stage."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(16) for _ in range(4))
        for one, other in ((3, 0), (2, 1)):
            self.blocks[one].up = self.blocks[other].up
            self.blocks[one].norm.weight = self.blocks[other].norm.weight


@pytest.mark.mpi(min_size=2)
@pytest.mark.at_most(4)
def test_weights_that_stages_share_in_another_order_have_one_sum(folder, alone):
    parallel = {"pipe": RANKS, "bucket_bytes": 256}
    with made(folder, model=Woven, cuts="blocks", parallel=parallel) as trainer:
        tests = trainer.fit()
    assert_as_alone(tests, trainer.module, alone(model=Woven))


@pytest.mark.parametrize("parallel", layouts())
def test_several_inputs_and_outputs(comm, folder, alone, parallel):
    data = {"train_data": Sentences(100, 1), "test_data": Sentences(30, 2), "workers": 1}
    with made(folder, **SEVERAL, **data, parallel=parallel) as trainer:
        tests = trainer.fit()
    assert_as_alone(tests, trainer.module, alone(**SEVERAL, **data))
    with torch.no_grad():
        samples = trainer.parts.data.test[:]
        outputs = trainer.module.double().eval()(**tensors(samples.inputs))
        loss = of_both(outputs, tensors(samples.labels).values())
    assert loss.item() == pytest.approx(tests[-1].test_loss, rel=1e-5)


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


@pytest.mark.parametrize("parallel", layouts())
def test_a_run_that_was_interrupted_ends_with_the_same_bits(comm, folder, parallel):
    """Also where it reads ahead when it goes on."""
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
