"""Torch modules whose matrices tensor ranks share by a map of names train as one process does."""

from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.checkpoint import checkpoint

import mpitrain
from mpitrain import nn
from mpitrain.adapters.torch.checks.share import Comparison
from mpitrain.checkpoint.saving import resume
from mpitrain.config import ConfigError
from mpitrain.metrics.records import Step
from mpitrain.update.agreement import NonFinite
from tests.cases import slow_case
from tests.mpi.mpitrain.layouts import RANKS, keep

F = torch.nn.functional

pytestmark = pytest.mark.quick_on(2, 4)
WORDS, LENGTH, WIDTH, CLASSES = 11, 5, 8, 3
SPLITS = {
    "attention.qkv": "columns of 3", "attention.width": "number", "heads": "number",
    "attention.out": "rows", "mlp.0": "columns", "mlp.3": "rows",
}  # fmt: skip


class Attention(torch.nn.Module):
    """Queries, keys and values lie side by side, and the code reads how wide they are."""

    def __init__(self):
        super().__init__()
        self.width, self.heads = WIDTH, 4
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).split(self.width, dim=-1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.2, self.training)


class Reader(torch.nn.Module):
    """Dropout among heads, among features that ranks share, and where all have them all."""

    def __init__(self, hidden=12):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.attention = Attention()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, hidden), torch.nn.GELU(), torch.nn.Dropout(0.2),
            torch.nn.Linear(hidden, WIDTH),
        )  # fmt: skip
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, words):
        x = self.words(words)
        x = x + self.attention(x)
        return self.head((x + self.mlp(self.norm(x))).mean(1))


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(int(i)))
        return words, int(words.sum()) % CLASSES


def made(folder, **given):
    usual = {
        "model": lambda: Reader().double(), "splits": SPLITS, "clip_norm": 0.5, "seed": 3,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
        "train_data": Sentences(), "loss": F.cross_entropy, "batch_size": 8, "epochs": 1,
    }  # fmt: skip
    return mpitrain.Trainer(dir=str(folder / "run"), **(usual | given))


def losses(trainer, steps=None):
    return [record.loss for record in islice(trainer.run_epoch(0), steps)]


@pytest.fixture(scope="module")
def one_process():
    """Losses, the optimiser's state and the values of one process."""
    with TemporaryDirectory() as own, made(Path(own), comm=MPI.COMM_SELF) as trainer:
        found = losses(trainer)
        state = trainer.torch_optimizer().state_dict()["state"]
        return found, state, trainer.module.state_dict()


@pytest.mark.skipif(RANKS % 2, reason="two tensor ranks")
@pytest.mark.parametrize(
    "parallel", [{}, {"zero": 3, "recompute": True}, slow_case({"zero": 2})], ids=str
)
def test_losses_values_and_state_are_those_of_one_process(folder, one_process, parallel):
    wanted, state, values = one_process
    with made(folder, parallel={"tensor": 2, **parallel}, micro_batches=2) as trainer:
        shapes = {one.name: (one.shape, one.whole) for one in trainer.parts.arena.tensors}
        assert shapes["part0.attention.qkv.weight"] == ((3 * WIDTH // 2, WIDTH), (24, WIDTH))
        assert shapes["part0.attention.out.weight"] == ((WIDTH, WIDTH // 2), (WIDTH, WIDTH))
        assert shapes["part0.attention.out.bias"] == ((WIDTH,), (WIDTH,))
        np.testing.assert_allclose(losses(trainer), wanted, rtol=1e-11)
        own = trainer.torch_optimizer().state_dict()["state"]
        found = trainer.module.state_dict()
    torch.testing.assert_close((found, own), (values, state), rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(RANKS % 2, reason="two tensor ranks")
def test_the_state_of_a_programs_optimiser_is_shared_as_its_parameters_are(comm, folder):
    torch.manual_seed(4)
    module = Reader().double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    F.cross_entropy(module(torch.arange(LENGTH)[None]), torch.tensor([1])).backward()
    optimizer.step()
    wanted = deepcopy(optimizer.state_dict()["state"])
    given = {"model": module, "optimizer": lambda parameters: optimizer, "parallel": {"tensor": 2}}
    with made(folder, **given) as trainer:
        own = trainer.torch_optimizer().state_dict()["state"]
    torch.testing.assert_close(own, wanted, rtol=0, atol=0)


class Block(torch.nn.Module):
    """Calls a shared matrix by keyword."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(LENGTH, 16), torch.nn.Linear(16, LENGTH)

    def forward(self, x):
        return x + self.down(input=self.up(input=x).relu())


def blocks():
    """One block twice, in parts of their own."""
    torch.manual_seed(0)
    block = Block()
    return torch.nn.Sequential(block, block, torch.nn.Linear(LENGTH, CLASSES)).double()


def tied():
    """Two blocks with one matrix, of which splits= names one."""
    module = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(LENGTH, CLASSES)).double()
    module[1].up.weight = module[0].up.weight
    return module


class Numbers(Sentences):
    def __getitem__(self, i):
        words, label = super().__getitem__(i)
        return words.double() / WORDS, label


def flat():
    """Columns and rows are in parts of their own."""
    torch.manual_seed(0)
    inner, last = torch.nn.Linear(LENGTH, 8), torch.nn.Linear(8, CLASSES)
    return torch.nn.Sequential(inner, torch.nn.Tanh(), last).double()


def nested():
    """Columns and rows are in parts of several parts, and a last one has the first one's name."""
    torch.manual_seed(0)
    inner, last = torch.nn.Linear(LENGTH, 8), torch.nn.Linear(8, CLASSES)
    ends = torch.nn.LayerNorm(CLASSES), torch.nn.Linear(CLASSES, CLASSES)
    up, down = (torch.nn.Sequential(one, torch.nn.Tanh()) for one in (inner, last))
    return torch.nn.Sequential(up, down, torch.nn.Sequential(*ends)).double()


class Looks(Block):
    """Calls its columns once more without gradients."""

    def forward(self, x):
        with torch.no_grad():
            self.up(x)
        return super().forward(x)


class Kept(Block):
    """Goes forward once more in the backward pass."""

    def forward(self, x):
        return x + checkpoint(lambda x: self.down(self.up(x).tanh()), x, use_reentrant=True)


class Narrow(Block):
    """Computes in 16 bits between columns and rows, of which half of the digits are compared."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class InPlace(Block):
    """Changes its input, and keeps what it has made once, in the type of the first pass."""

    made = None

    def forward(self, x):
        self.made = x.new_ones(LENGTH, 1) if self.made is None else self.made
        return super().forward(x.mul_(2)) + x @ self.made


def between(middle, kind=torch.float64):
    torch.manual_seed(0)
    first, last = torch.nn.Linear(LENGTH, LENGTH), torch.nn.Linear(LENGTH, CLASSES)
    return torch.nn.Sequential(first, middle(), last).to(kind)


class Mixes(Block):
    """Ranks share the columns, and each one's gradient by the factor is that of its columns."""

    def forward(self, x):
        return x + self.down(self.up(x).tanh() * x.mean(-1, keepdim=True))


def mixing_first():
    """Nobody asks for that gradient by data."""
    torch.manual_seed(0)
    return torch.nn.Sequential(Mixes(), torch.nn.Linear(LENGTH, CLASSES)).double()


BLOCKS, FLAT = {"up": "columns", "down": "rows"}, {"0": "columns", "2": "rows"}


@pytest.mark.skipif(RANKS != 2, reason="two tensor ranks")
@pytest.mark.parametrize(
    ("model", "splits"),
    [
        (blocks, BLOCKS),
        (partial(between, Looks), BLOCKS),
        (partial(between, Kept), BLOCKS),
        (partial(between, InPlace, torch.float32), BLOCKS),
        (partial(between, Narrow, torch.float32), BLOCKS),
        (mixing_first, BLOCKS),
        (flat, FLAT),
        (nested, {"1.0": "rows", "0.0": "columns"}),
    ],
)
def test_parts_in_turn_are_shared(comm, folder, model, splits):
    given = {"model": model, "splits": splits, "train_data": Numbers()}
    found = []
    for ranks in MPI.COMM_SELF, comm:
        place = folder / f"on {ranks.size}"
        with made(place, comm=ranks, parallel={"tensor": ranks.size}, **given) as trainer:
            found.append(losses(trainer))
            rtol = 1e-11 if trainer.parts.config.run.dtype == "float64" else 1e-3
    np.testing.assert_allclose(found[1], found[0], rtol=rtol)


class Heads(Block):
    def __init__(self):
        super().__init__()
        self.heads = 8

    def forward(self, x):
        return self.down(self.up(x).unflatten(-1, (self.heads, -1)).softmax(-1).flatten(-2))


@pytest.mark.skipif(RANKS != 2, reason="two tensor ranks")
def test_numbers_that_on_record_sets_are_shared_anew(comm, folder):
    splits, found = BLOCKS | {"heads": "number"}, []
    given = {"model": partial(between, Heads), "splits": splits, "train_data": Numbers()}

    def fit(name, ranks, heads):
        def on_record(record):
            if isinstance(record, Step):
                found.append(record.loss)
                trainer.module[1].heads = heads

        with made(folder / name, comm=ranks, parallel={"tensor": ranks.size}, **given) as trainer:
            trainer.fit(on_record=on_record)

    fit(f"alone {comm.rank}", MPI.COMM_SELF, 4)
    fit("shared", comm, 4)
    np.testing.assert_allclose(found[:3], found[3:], rtol=1e-11)
    with pytest.raises(ConfigError, match=r"heads cannot be 1 in part1: .*share the 1 of it"):
        fit("odd", comm, 1)


@pytest.mark.skipif(RANKS != 2, reason="two tensor ranks")
def test_a_run_goes_on_without_splits_on_ranks_that_share_nothing(comm, folder, one_process):
    with made(folder, parallel={"tensor": 2}) as trainer:
        found = losses(trainer, 2)
        keep(trainer)
    with made(folder, splits={}) as trainer:
        assert resume(trainer.parts).step == 2
        found += losses(trainer, 1)
    np.testing.assert_allclose(found, one_process[0][:3], rtol=1e-11)


@pytest.mark.skipif(RANKS != 2, reason="two tensor ranks")
@pytest.mark.parametrize("turns", [(FLAT, {}), ({}, FLAT)])
def test_a_run_goes_on_where_splits_make_other_layers(comm, folder, turns):
    given, found = {"model": flat, "train_data": Numbers(), "splits": {}}, []
    for splits in turns:
        layout = {"parallel": {"tensor": 2} if splits else {}, "splits": splits}
        with made(folder, **given | layout) as trainer:
            resume(trainer.parts)
            found += losses(trainer, 1)
            keep(trainer)
    with made(folder / "alone", comm=MPI.COMM_SELF, **given) as trainer:
        np.testing.assert_allclose(found, losses(trainer, 2), rtol=1e-11)


LOST = r"different gradients of .*part0.*by its other inputs"


class Near(Mixes):
    """Takes small biases alone."""

    def forward(self, x):
        if self.up.bias.abs().max() > 0.05:
            raise ValueError("a bias is large")
        return super().forward(x)


def mixing(factor=1.0, constant=0.0, kind=torch.float64, middle=Mixes):
    """Lost gradients reach parameters of the part before alone."""
    model = between(middle)
    for own in model[1].parameters():
        own.data.mul_(factor).add_(constant)
    return model.to(kind)


LOSE = [(), (0.0,), (0.0, 0.1), (0.0, 0.0, torch.float32), (0.0, 0.0, torch.float64, Near)]


@pytest.mark.skipif(RANKS != 2, reason="two tensor ranks")
@pytest.mark.parametrize("given", LOSE, ids=str)
def test_what_is_lost_for_any_values_is_told_before_the_first_step(folder, given):
    given, compute = partial(mixing, *given), "bfloat16" if len(given) == 3 else "same"
    given = {"model": given, "compute": compute, "splits": BLOCKS, "train_data": Numbers()}
    with pytest.raises(ConfigError, match=r"part1 cannot .*results or gradients"):
        made(folder, parallel={"tensor": 2}, **given)


@pytest.fixture
def untried(monkeypatch):
    """Code that the trial does not reach, as that for rare numbers."""
    monkeypatch.setattr(Comparison, "expect_same", lambda self, training: None)


@pytest.mark.skipif(RANKS % 2, reason="two tensor ranks")
@pytest.mark.parametrize(
    ("given", "step"),
    [
        ({}, "step 1"),
        ({"parallel": {"zero": 3, "bucket_bytes": 1}}, "step 1"),
        ({"sync": {"kind": "local", "period": 2, "agree": 2}}, "until step 2"),
    ],
    ids=str,
)
def test_gradients_that_are_lost_on_other_ranks_are_told(folder, given, step, untried):
    given = {"model": mixing, "splits": BLOCKS, "train_data": Numbers(), **given}
    given["parallel"] = given.get("parallel", {}) | {"tensor": 2}
    with made(folder, **given) as t, pytest.raises(ConfigError, match=f"^{step}: .*{LOST}"):
        losses(t)


@pytest.mark.skipif(RANKS != 4, reason="two stages of two tensor ranks")
def test_they_are_told_where_stages_update_by_themselves(folder, untried):
    given = {"model": mixing, "splits": BLOCKS, "train_data": Numbers(), "micro_batches": 2}
    given |= {"clip_norm": 0, "optimizer": lambda p: torch.optim.SGD(p, lr=0.01)}
    parallel = {"tensor": 2, "pipe": 2, "schedule": "asynchronous"}
    with made(folder, parallel=parallel, **given) as t, pytest.raises(ConfigError, match=LOST):
        losses(t)


@pytest.mark.skipif(RANKS != 2, reason="two tensor ranks")
def test_a_number_that_is_not_finite_on_one_of_them_is_told(comm, folder, monkeypatch):
    with made(folder, parallel={"tensor": 2}) as trainer:
        gradient, unequal = trainer.parts.gradient, trainer.parts.gradient.unequal_copies

        def spoilt(itemsize):
            for piece in gradient.store.pieces:
                piece.gradients[-1:] = np.nan if comm.rank else 0.0
            return unequal(itemsize)

        monkeypatch.setattr(gradient, "unequal_copies", spoilt)
        with pytest.raises(NonFinite, match="not finite at step 1"):
            losses(trainer)


def of_numbers(middle):
    """Five parts, of which 2 and 4 are one module."""

    def model():
        first = torch.nn.Linear(LENGTH, 8)
        inner = torch.nn.Tanh(), middle(8, 8)
        return torch.nn.Sequential(first, *inner, *inner, torch.nn.Linear(8, CLASSES)).double()

    return {"model": model, "train_data": Numbers()}


def normed(*sizes):
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(*sizes))


#: Arguments, and the sentence that refuses them.
REFUSED = [
    ({"splits": {}}, "nothing says how tensor ranks share the model; give splits="),
    ({"splits": {"mlp.7": "rows"}}, "no module 'mlp.7' with a weight of its own in a Reader"),
    ({"splits": {"mlp.0": "halves"}}, "write 'columns', 'columns of 3' where three"),
    ({"splits": {"norm": "columns"}}, "has norm, a LayerNorm, and tensor ranks share"),
    ({"splits": SPLITS | {"attention.qkv": "columns"}}, "results or gradients are others"),
    ({"splits": {"mlp.0": "columns"}}, "cannot be shared by its map of names"),
    ({"splits": {"mlp.3": "rows"}}, "cannot be shared by its map of names"),
    ({"model": lambda: Reader(13).double()}, "2 ranks cannot share the 13 of it equally"),
    ({"model": tied, "splits": {"0.up": "columns", "0.down": "rows"}, "train_data": Numbers()},
     "part1.up.weight is part0.up.weight, too, and one of the two alone"),
    (of_numbers(normed) | {"splits": FLAT},
     "no module '2' with a weight of its own"),
    (of_numbers(torch.nn.Linear) | {"splits": {"2": "columns", "4": "rows"}},
     "has 4, which is 2 by another name"),
    ({"splits": SPLITS | {"mlp.1": "rows"}}, "no module 'mlp.1' with a weight of its own in a"),
    ({"splits": {0: "columns"}}, "splits: 0 is 'columns'; write"),
    ({"model": lambda: {"up": nn.Linear(LENGTH, CLASSES)}, "splits": {}},
     "is a Linear, which tensor ranks cannot share"),
]  # fmt: skip


@pytest.mark.skipif(RANKS != 2, reason="two tensor ranks")
@pytest.mark.parametrize(("given", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_cannot_be_shared_is_refused_when_the_trainer_is_made(folder, given, why):
    with pytest.raises(ConfigError, match=why):
        made(folder, parallel={"tensor": 2}, **given)
