"""Experts of torch modules on several ranks against all of them in one process."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from mpi4py import MPI

import mpitrain
from mpitrain.checkpoint.export import export
from mpitrain.config import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
nn, F = torch.nn, torch.nn.functional

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(2, 4)]
RANKS = MPI.COMM_WORLD.size
WORDS, LENGTH, WIDTH, CLASSES, EXPERTS, TOP = 11, 5, 8, 3, 3, 2  # fewer experts than 4 ranks


class Block(nn.Module):
    """A router, a shared expert, and a loop over the experts that were hit."""

    def __init__(self, hit=True, favourite=None, jitter=0.0, dropout=0.1):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))
            for _ in range(EXPERTS)
        )
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.hit, self.favourite, self.jitter, self.dropout = hit, favourite, jitter, dropout

    def route(self, rows):
        if self.favourite is not None:  # every row, also with a tie of all others
            scores = torch.zeros(len(rows), EXPERTS, dtype=rows.dtype)
            scores[:, self.favourite] = 1.0
            scores = scores + 0.0 * self.gate(rows)
        else:
            scores = self.gate(rows)
        return scores.softmax(-1).topk(1 if self.favourite is not None else TOP)

    def forward(self, x):
        if self.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.route(rows)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, place = torch.where(chosen == number)
            if len(at) or not self.hit:
                made = expert(rows[at])[:, :WIDTH]
                y = y.index_add(0, at, made * weights[at, place, None])
        y = F.dropout(y + self.shared(rows), self.dropout, self.training).reshape(x.shape)
        return y


class Stack(nn.Module):
    """Experts in one module, as transformers have them."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 6) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 6, WIDTH) / 3)

    def forward(self, rows, chosen, weights):
        y = torch.zeros_like(rows)
        for number in range(self.num_experts):
            at, place = torch.where(chosen == number)
            made = (rows[at] @ self.up[number]).tanh() @ self.down[number]
            y = y.index_add(0, at, made * weights[at, place, None])
        return y


class Stacked(Block):
    def __init__(self):
        super().__init__()
        self.experts = Stack()

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.route(rows)
        made = self.experts(rows, weights=weights, chosen=chosen)
        return (made + self.shared(rows)).reshape(x.shape)


class Sparse(nn.Module):
    """Few rows find an expert; the frozen experts of both blocks lie in a module without code.

    Rows are multiplied by their scores, of which alone parameters are trained.
    """

    def __init__(self):
        super().__init__()
        self.gate, self.inner = nn.Linear(WIDTH, EXPERTS), nn.Module()
        nn.init.constant_(self.gate.bias, -1.3)
        self.inner.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.inner.requires_grad_(False)

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        scores, y = self.gate(rows).sigmoid(), torch.zeros_like(rows)
        for number, expert in enumerate(self.inner.experts):
            (at,) = torch.where(scores[:, number] > 0.4)
            if len(at):
                y = y.index_add(0, at, expert(input=rows[at] * scores[at, number, None]))
        return y.reshape(x.shape)


class Reader(nn.Module):
    """Two blocks with residuals; outputs are scores and a loss of each sample's choices."""

    def __init__(self, block=Block, **options):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words):
        x = self.through(self.words(words), words)
        p = self.blocks[1].gate(x).softmax(-1).mean(1)
        return self.head(x.mean(1)), (p**2).sum(-1)

    def through(self, x, words):
        for block in self.blocks:
            x = x + block(x)
        return x


class Choosing(Reader):
    """A sample goes through the blocks that its first word chooses, in the order that it says.

    Micro-batches call the experts of none, of some, more often, or in another order.
    """

    def __init__(self, again=False, **options):
        super().__init__(**options)
        self.again = again

    def through(self, x, words):
        for kind, numbers in enumerate([(), (0,), (0, 1), (1, 0, 1)]):
            (at,) = torch.where(words[:, 0] % 4 == kind)
            if len(at):
                one = x[at]
                for number in numbers:
                    block = self.blocks[number]
                    one = one + (_checkpoint(block, one) if self.again else block(one))
                x = x.index_copy(0, at, one)
        return x


def _checkpoint(block, x):
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def judged(outputs, labels):
    """With an auxiliary loss, a mean over samples."""
    scores, balance = outputs
    return F.cross_entropy(scores, labels) + 0.1 * balance.mean()


def frozen(kind=Reader, **options):
    model = kind(**options)
    for block in model.blocks:
        block.experts.requires_grad_(False)
    return model


def first_frozen(**options):
    """Nothing is trained before the first block, and some experts in it are frozen."""
    model = Reader(**options)
    model.words.requires_grad_(False)
    model.blocks[0].experts[0].requires_grad_(False)
    return model


def sparse():
    model = Reader(Sparse)
    model.words.requires_grad_(False)
    model.blocks[1].inner = model.blocks[0].inner
    return model


class Sentences(torch.utils.data.Dataset):
    def __init__(self, samples=24):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(int(i)))
        return words, int(words.sum()) % CLASSES


MODELS = {
    "list": Reader,
    "all called": lambda: Reader(hit=False),
    "all to one": lambda: Reader(favourite=1),
    "jitter": lambda: Reader(jitter=0.2),
    "stack": lambda: Reader(Stacked),
    "frozen": frozen,
    "first frozen": first_frozen,
    "sparse": sparse,
    "choosing": lambda: Choosing(dropout=0.0),
    "choosing stack": lambda: Choosing(block=Stacked),
    "choosing, computed again": lambda: Choosing(dropout=0.0, again=True),
    "choosing frozen": lambda: frozen(Choosing, dropout=0.0),
}
WHOLE = dict(experts=RANKS)
#: Several groups where ranks can make them.
GROUPS = dict(experts=2) if RANKS in (4, 8) else WHOLE
LAYOUTS = {
    "experts": WHOLE,
    "zero 1": dict(**WHOLE, zero=1),
    "zero 2": dict(**WHOLE, zero=2),
    "zero 3": dict(**WHOLE, zero=3, recompute=True),
    "groups": GROUPS,
    "groups, zero 1": GROUPS | dict(zero=1),
    **({"pipe": dict(experts=RANKS // 2, pipe=2)} if RANKS % 2 == 0 else {}),
}


def made(folder, model, **given):
    usual = {
        "shadow": 0,
        "micro_batches": 2,
        "batch_size": 8,
        "epochs": 2,
        "dir": str(folder / "run"),
    }
    return mpitrain.Trainer(
        model=lambda: model().double(),
        train_data=Sentences(),
        test_data=Sentences(7),
        loss=judged,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
        seed=3,
        clip_norm=0.5,
        **usual | given,
    )


def run(trainer):
    """Losses of steps, and of tests, and the values."""
    losses = []
    tests = trainer.fit(on_record=lambda one: losses.append(getattr(one, "loss", 0.0)))
    return [*losses, *(test.test_loss for test in tests)], trainer.module.state_dict()


@cache
def one_process(name):
    with (
        TemporaryDirectory() as own,
        made(Path(own), MODELS[name], comm=MPI.COMM_SELF, micro_batches=1) as trainer,
    ):
        return run(trainer)


def grid():
    found = []
    quick = {("list", "groups, zero 1"), ("first frozen", "experts")}
    for name in MODELS:
        for layout in LAYOUTS:
            # Drawn numbers, or experts, that two parts would need.
            if layout == "pipe" and name.startswith(("jitter", "sparse", "choosing")):
                continue
            marks = () if (name, layout) in quick else pytest.mark.slow
            found.append(pytest.param(name, layout, marks=marks, id=f"{name} {layout}"))
    return found


@pytest.mark.parametrize(("name", "layout"), grid())
def test_losses_and_values_are_those_of_one_process(folder, name, layout):
    cuts = "blocks" if "pipe" in layout else ()
    parallel = {"bucket_bytes": 512, **LAYOUTS[layout]}
    wanted, values = one_process(name)
    with made(folder, MODELS[name], parallel=parallel, cuts=cuts, experts="experts") as trainer:
        found, own = run(trainer)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    for key, value in own.items():
        torch.testing.assert_close(value, values[key], rtol=1e-9, atol=1e-12)


def test_a_rank_has_the_bytes_of_its_share(comm, folder):
    """Also where ranks do not divide the experts: parameters and the optimiser's state."""
    for model in ("list", "stack"):
        parallel, own = {"experts": RANKS}, folder / model
        with made(own, MODELS[model], parallel=parallel, experts="blocks.*.experts") as trainer:
            arena = trainer.parts.arena
            sizes = {True: 0, False: 0}
            for tensor in arena.tensors:
                sizes[".experts." in tensor.name] += tensor.stop - tensor.start
            whole = sum(p.numel() for p in trainer.module.parameters())
            experts = sum(p.numel() for b in trainer.module.blocks for p in b.experts.parameters())
            here = (comm.rank + 1) * EXPERTS // RANKS - comm.rank * EXPERTS // RANKS
            assert sizes == {True: experts * here // EXPERTS, False: whole - experts}
            assert arena.size == sum(sizes.values())
            state = trainer.parts.updater.state
            assert sum(v.size for slots in state for v in slots.values()) == 2 * arena.size


def test_micro_batches_without_samples(folder):
    """A rank without samples serves the rows of others."""
    given = {"batch_size": 3, "epochs": 1, "steps": 4}
    with (
        TemporaryDirectory() as own,
        made(Path(own), Reader, comm=MPI.COMM_SELF, micro_batches=1, **given) as trainer,
    ):
        wanted, values = run(trainer)
    parallel = {"experts": RANKS, "zero": 2}
    with made(folder, Reader, parallel=parallel, experts="experts", **given) as trainer:
        found, own = run(trainer)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    for key, value in own.items():
        torch.testing.assert_close(value, values[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", ["list", pytest.param("stack", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_another_layout_and_is_exported_whole(comm, folder, model):
    _, values = one_process(model)
    given = {"checkpoint": {"every": 3}, "experts": "experts"}
    with made(folder, MODELS[model], parallel={"experts": RANKS}, steps=3, **given) as trainer:
        trainer.fit()
    given["experts"] = ()
    with made(folder, MODELS[model], parallel={"zero": 1}, **given) as trainer:
        trainer.fit(resume=True)
        own = trainer.module.state_dict()
        trainer.torch_optimizer()
    for key, value in own.items():
        torch.testing.assert_close(value, values[key], rtol=1e-9, atol=1e-12)
    if comm.rank == 0:
        export(folder / "run", folder / "model.safetensors", torch=True)
        from safetensors.torch import load_file

        assert load_file(folder / "model.safetensors").keys() == values.keys()


class Chained(Block):
    """An expert gets what the one before it has made."""

    def forward(self, x):
        for expert in self.experts:
            x = expert(x)
        return x + 0.0 * self.gate(x).sum()


class Dropping(Block):
    def __init__(self):
        super().__init__()
        for expert in self.experts:
            expert.append(nn.Dropout(0.5))


class Again(Block):
    """Computes a part of its own forward pass again in the backward pass."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Reading(Block):
    """Reads the parameters of experts, which it does not call."""

    def forward(self, x):
        return x + sum(expert[0].weight.sum() for expert in self.experts)


class Widening(Block):
    def __init__(self):
        super().__init__()
        self.experts[EXPERTS - 1].append(nn.Linear(WIDTH, 2 * WIDTH))


class Tied(Block):
    def __init__(self):
        super().__init__()
        self.experts[0][0].weight = self.experts[1][0].weight


class Twice(Block):
    def __init__(self):
        super().__init__()
        self.experts[0] = self.experts[1]


#: Model, the names of its experts, and the sentence that refuses both.
REFUSED = [
    (Reader, "expert", "there is no module 'expert' in a Reader; give a name that print"),
    (Reader, "blocks.0", r"blocks.0 \(Block\) cannot be shared; experts are a torch.nn.ModuleList"),
    (Reader, ("blocks", "experts"), "experts lies in blocks, which has experts itself"),
    (lambda: Reader(Chained), "experts", "others than those of one process"),
    (lambda: Reader(Dropping), "experts", "draws random numbers (for rows|of the shape)"),
    (lambda: Reader(Again), "experts", "rather than a part of its forward"),
    (lambda: Reader(Reading), "experts", "cannot be shared as experts= says"),
    (lambda: Reader(Widening), "experts", "experts make|another rank has seen a fault|size of"),
    (lambda: Reader(Twice), "experts", "or one twice"),
    (lambda: Reader(Tied), "experts", "others use 0.weight of an expert, too; untie it"),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("model", "names", "why"), REFUSED)
def test_what_cannot_be_shared_is_refused_on_all_ranks(folder, model, names, why):
    with pytest.raises(ConfigError, match=why):
        made(folder, model, parallel={"experts": RANKS}, experts=names)
