"""Samples of unequal lengths, weights and DataLoaders: every layout is torch's own loop."""

import random

import numpy as np
import pytest
from mpi4py import MPI

import mpitrain
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from tests.cases import mostly_slow, slow_case
from tests.mpi.mpitrain.fits import PARALLEL, RANKS, Waves, assert_alike, loop, made, sgd, torch

pytestmark = pytest.mark.at_most(4)
utils = torch.utils.data


class Lines(utils.Dataset):
    """Words of lines of 2 to 11, with a name that no model sees, a class and a weight."""

    def __init__(self, samples, seed):
        self.samples, self.seed = samples, seed

    def __len__(self):
        return self.samples

    def length(self, index):
        return 2 + (index * 7 + self.seed) % 10

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        words = torch.randint(1, 9, (self.length(index),), generator=draw)
        return {"words": words, "name": f"line {index}"}, int(words.sum()) % 3, 0.5 + index % 4


def pad(samples):
    lines, classes, weights = zip(*samples, strict=True)
    words = [line["words"] for line in lines]
    padded = torch.nn.utils.rnn.pad_sequence(words, batch_first=True)
    kept = torch.arange(padded.shape[1]) < torch.tensor([len(one) for one in words])[:, None]
    named = {"words": padded, "kept": kept, "name": [line["name"] for line in lines]}
    return named, torch.tensor(classes), torch.tensor(weights, dtype=torch.float64)


class Recurrent(torch.nn.Module):
    """Attention over the words that are kept, and what crosses a cut has their length."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(9, 8), torch.nn.LayerNorm(8)
        self.mix = torch.nn.Linear(8, 8)
        self.gate = torch.nn.Linear(8, 1, bias=False)  # softmax leaves a bias no gradient
        self.out = torch.nn.Linear(8, 3)

    def forward(self, words, kept):
        x = self.norm(self.table(words))
        x = x + torch.tanh(self.mix(x))
        gates = self.gate(x)[..., 0].masked_fill(~kept, float("-inf"))
        return self.out((torch.softmax(gates, 1)[..., None] * x).sum(1))


def weighted(outputs, classes, weights):
    return (torch.nn.functional.cross_entropy(outputs, classes, reduction="none") * weights).mean()


class Buckets:
    """Batches of lines of like lengths, shuffled anew in each epoch."""

    def __init__(self, data, size):
        self.data, self.size = data, size

    def __len__(self):
        return -(-len(self.data) // self.size)

    def __iter__(self):
        order = sorted(range(len(self.data)), key=self.data.length)
        batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        random.shuffle(batches)
        return iter(batches)


def loader_of(batches, collate=pad):
    lines = Lines(50, 1)
    return utils.DataLoader(lines, batch_sampler=batches(lines, 12), collate_fn=collate)


def given(**changed):
    usual = {
        "model": Recurrent, "cuts": ["norm", "mix"], "train_data": loader_of(Buckets),
        "test_data": utils.DataLoader(Lines(31, 2), batch_size=7, collate_fn=pad),
        "loss": weighted, "optimizer": sgd, "classes": 3,
        "metrics": {"hits": lambda y, t, w: ((y.argmax(1) == t) * w).sum() / len(w)},
    }  # fmt: skip
    return usual | changed


def by_weight(module, batch):
    x, *rest = batch
    return weighted(module(x["words"], x["kept"]), *rest)


def torchs_own(batches):
    torch.manual_seed(7)
    module = Recurrent().double()
    loop(module, sgd, batches, by_weight)
    return module


def batches_of(trainer):
    """Batches of two epochs, padded as a whole."""
    data, sampler = trainer.parts.data.train.data, trainer.parts.sampler
    every = [batch for epoch in range(2) for batch in sampler.batches(epoch)]
    return [pad([data[i] for i in batch.tolist()]) for batch in every]


#: Messages of pipelines carry checksums.
SPLIT = {"parallel": PARALLEL}
if "pipe" in PARALLEL:
    SPLIT = {"parallel": PARALLEL | {"checksums": True}, "micro_batches": 2}


def test_it_is_torchs_own_loop(folder):
    """Bucketed batches of weighted samples, padded in each micro-batch to its own length."""
    with made(folder, **given(workers=1, **SPLIT)) as trainer:
        tests = trainer.fit()
    module, test = torchs_own(batches_of(trainer)), trainer.parts.data.test.data
    assert_alike(trainer.module, module)
    wanted = by_weight(module, pad([test[i] for i in range(len(test))])).item()
    assert tests[-1].test_loss == pytest.approx(wanted, rel=1e-9)


LINES = Lines(50, 1)
DIVIDED = utils.DistributedSampler(LINES, num_replicas=2, rank=RANKS - 1 & 1)
#: Options of a loader, and the sizes of its batches.
LOADERS = {
    "divided": ({"batch_size": 6, "sampler": DIVIDED}, [12] * 4 + [2]),
    "weighted": ({"sampler": utils.WeightedRandomSampler(torch.arange(1.0, 51.0), 60)}, [12] * 5),
    "dropped": ({"drop_last": True, "shuffle": True}, [12] * 4),
    "in turn": ({}, [12] * 4 + [2]),
    "split": ({"sampler": utils.SubsetRandomSampler(range(0, 50, 2))}, [12, 12, 1]),
}


@pytest.mark.parametrize("kind", mostly_slow(LOADERS, ["divided"]))
def test_a_loader_gives_size_and_order(folder, kind):
    """Over all ranks; a DistributedSampler's size is that of a rank."""
    own, sizes = LOADERS[kind]
    loader = utils.DataLoader(LINES, collate_fn=pad, **{"batch_size": 12} | own)
    with made(folder, **given(train_data=loader)) as trainer:
        trainer.fit()
        first, second = (list(trainer.parts.sampler.batches(epoch)) for epoch in (0, 1))
    assert_alike(trainer.module, torchs_own(batches_of(trainer)))
    assert [len(batch) for batch in first] == sizes
    seen = np.concatenate(first).tolist()
    assert (seen == list(range(50))) == (kind == "in turn") == (seen == np.hstack(second).tolist())
    if kind == "split":
        assert sorted(seen) == list(range(0, 50, 2))
    elif kind != "weighted":
        assert len(set(seen)) == len(seen)


class InTurn(utils.IterableDataset):
    def __len__(self):
        return len(LINES)

    def __iter__(self):
        return map(LINES.__getitem__, range(len(LINES)))


@pytest.mark.parametrize("wrapped", [slow_case(False), True])
def test_a_loader_of_a_stream(folder, wrapped):
    loader = utils.DataLoader(InTurn(), 12, collate_fn=pad)
    data = mpitrain.Stream(loader, 50) if wrapped else loader
    with made(folder, **given(train_data=data), batch_size=12) as trainer:
        trainer.fit()
    batches = utils.DataLoader(LINES, 12, collate_fn=pad)
    assert_alike(trainer.module, torchs_own([*batches, *batches]))


def unmasked(samples):
    named, *rest = pad(samples)
    return {**named, "kept": torch.ones_like(named["kept"])}, *rest


class Even(Lines):
    def length(self, index):
        return 5


def mixed(samples):
    named, *rest = pad(samples)
    return {**named, "words": named["words"].flip(0)}, *rest


class Rare(Lines):
    """Only samples that a look at a few of all passes over are longer."""

    def length(self, index):
        return 9 if index % 7 == 3 else 4


def silent():
    """A head of zeros hides at first that padding has a part in its input."""
    made = Recurrent()
    torch.nn.init.zeros_(made.out.weight)
    return made


class Drawn(Buckets):
    """Draws from a generator of its own."""

    def __iter__(self):
        order = np.random.default_rng().permutation(len(self.data)).tolist()
        return iter([order[i : i + self.size] for i in range(0, len(order), self.size)])


class Later(Buckets):
    """Goes by the rank from the second epoch on."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batches = list(super().__iter__())
        return iter(batches[::-1] if MPI.COMM_WORLD.rank and self.epoch else batches)


class Failing(Later):
    def __iter__(self):
        assert not MPI.COMM_WORLD.rank or not self.epoch, "no lines"
        return Buckets.__iter__(self)


class Cut(Buckets):
    """Goes by the rank in where a batch ends alone."""

    def __len__(self):
        return super().__len__() + 1

    def __iter__(self):
        *others, last = sorted(super().__iter__(), key=len)
        cut = 3 + (MPI.COMM_WORLD.rank > 0)
        return iter([*others, last[:cut], last[cut:]])


#: Arguments, the samples first, the error, and words of it; ranks divide some, and are told
#: when the epoch begins.
REFUSED = [
    (loader_of(Buckets, unmasked), {}, ConfigError, "padding has a part in it"),
    (utils.DataLoader(Rare(50, 1), 12, collate_fn=unmasked), {},
     ConfigError, "padding has a part in it"),
    (loader_of(Buckets, unmasked), {"model": silent}, ConfigError, "padding has a part in it"),
    (utils.DataLoader(Even(50, 1), 12, collate_fn=mixed), {},
     DataError, "collate_fn gives other inputs for samples 0 and 49 in one batch than for each"),
    (loader_of(Drawn), {}, DataError, "Drawn gives two orders of one epoch"),
    (loader_of(Buckets, lambda samples: (torch.ones(5), torch.ones(5))), {},
     DataError, r"collate_fn gives shape \(5,\); the first axis must be the 3 samples"),
    (loader_of(Buckets, lambda samples: 1 / 0), {},
     DataError, "the batch of samples 0, 1, 2 of Lines: collate_fn: ZeroDivisionError"),
    (LINES, {"test_data": None, "metrics": None, "cuts": ()},
     DataError, "or collate_fn= must make batches of them"),
    *((loader, {"batch_size": 8}, DataError,
       "a DataLoader with batches of 12 samples.* train.batch_size = 8; leave one of")
      for loader in (utils.DataLoader(Waves(50, 1), 12), loader_of(Buckets))),
    (None, {"collate_fn": pad}, TypeError, "collate_fn without train_data"),
    *((utils.DataLoader(LINES, 12, collate_fn=pad, **how), {table: keys, "optimizer": "sgd"},
       ConfigError, f"{table}: .* shuffle=True and drop_last=False")
      for how in ({}, {"shuffle": True, "drop_last": True})
      for table, keys in (("federated", {"clients": 3}), ("sync", {"split": "iid"}))),
    *(pytest.param(loader_of(batches), {}, DataError, told, marks=pytest.mark.mpi(min_size=2))
      for batches, told in (
        (Cut, "other samples on some ranks than on others in epoch 0"),
        (Later, "other samples on some ranks than on others in epoch 1"),
        (Failing, r"Failing cannot be read: .*no lines.* \(rank 1 of"))),
]  # fmt: skip


@pytest.mark.parametrize(("data", "changed", "error", "told"), REFUSED)
def test_what_would_train_other_numbers_is_refused(comm, folder, data, changed, error, told):
    with pytest.raises(error, match=told) as raised:
        made(folder, **given(train_data=data, **changed)).fit()
    assert len(set(comm.allgather(str(raised.value)))) == 1


@pytest.mark.parametrize("draws", [False, True])
def test_numbers_that_a_batch_draws_have_a_warning_of_rank_0(comm, folder, caplog, draws):
    def noisy(samples):
        torch.rand(int(draws))
        return pad(samples)

    caplog.set_level("INFO", "mpitrain")
    with made(folder, **given(train_data=loader_of(Buckets, noisy))):
        said = [line for line in caplog.messages if "collate_fn draws" in line]
        assert len(said) == (draws and comm.rank == 0)
