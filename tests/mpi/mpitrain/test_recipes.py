"""Recipes of loops of torch: losses, parameters and metrics are one process's in every layout."""

import math
from dataclasses import dataclass
from functools import partial

import pytest

import mpitrain
from mpitrain.config import ConfigError
from mpitrain.metrics.records import Step
from tests.cases import slow_case
from tests.mpi.mpitrain.fits import RANKS, loop, sgd, torch
from tests.zoo.parts import Of

pytestmark = pytest.mark.quick_on(2)
nn, F = torch.nn, torch.nn.functional
DRAW = torch.Generator().manual_seed(5)
X = torch.randn(22, 6, generator=DRAW).double()
Y = X.sin().sum(1, keepdim=True)
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
WORDS = torch.randint(0, 5, (22, 4), generator=DRAW)
WORDS[::3, 2:] = -100


@dataclass
class Found:
    scores: torch.Tensor
    rest: object = None


class Rows(torch.utils.data.Dataset):
    """Labels, of which there may be several, beside inputs or among them."""

    def __init__(self, labels, *, within=False):
        self.labels, self.within = labels, within

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        of = {name: values[i] for name, values in self.labels.items()}
        return {"x": X[i], **of} if self.within else (X[i], of.get("y", of))


class Net(nn.Module):
    """Two parts, and what it gives of the results of both."""

    def __init__(self, give=lambda y: y, outputs=1, norm=nn.Identity):
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 8), norm()
        self.leave, self.give = nn.Linear(8, outputs), give

    def forward(self, x):
        return self.give(self.leave(torch.tanh(self.norm(self.enter(x)))))


class Own(Net):
    """Computes its loss: of two means with learned weights, and with a penalty."""

    def __init__(self, how):
        super().__init__(outputs=20 if how == "words" else 2)
        self.how, self.logs = how, nn.Parameter(torch.zeros(2))

    def forward(self, x, labels):
        y = super().forward(x)
        if self.how == "words":
            return {"loss": F.cross_entropy(y.reshape(-1, 5), labels.reshape(-1)), "y": y}
        loss = F.mse_loss(y[:, :1], labels)
        if self.how == "penalty":
            return {"loss": loss + 0.1 * sum(p.square().sum() for p in self.parameters())}
        both = torch.stack([loss, F.l1_loss(y[:, 1:], labels)])
        return {"loss": (both * torch.exp(-self.logs)).sum() + self.logs.sum()}


def reentrant():
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    return Of(lambda m, x: checkpoint(m.inner, m.enter(x)), enter=nn.Linear(6, 8), inner=inner)


class Activated(nn.BatchNorm1d):
    """Calls the function itself, as norms with an activation in them do."""

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        kept = self.running_mean, self.running_var, self.weight, self.bias
        return F.relu(F.batch_norm(x, *kept, self.training, self.momentum, self.eps))


def as_function():
    return Of(lambda m, x: F.batch_norm(x, None, None, training=True))


def without_running():
    return nn.BatchNorm1d(8, track_running_stats=False)


def with_forward():
    norm = nn.BatchNorm1d(8)
    norm.forward = (lambda own, x: 2 * nn.BatchNorm1d.forward(own, x)).__get__(norm)
    return norm


def two_counts(outputs, labels):
    """Classes of samples, and of words, of which some are left out."""
    words, wanted = outputs[1].reshape(-1, 5), labels["words"].reshape(-1)
    return [
        (F.cross_entropy(outputs[0], labels["classes"], reduction="sum"), len(outputs[0])),
        (0.5 * F.cross_entropy(words, wanted, reduction="sum"), (wanted != -100).sum()),
    ]


def two_means(outputs, labels):
    words, wanted = outputs[1].reshape(-1, 5), labels["words"].reshape(-1)
    return F.cross_entropy(outputs[0], labels["classes"]) + 0.5 * F.cross_entropy(words, wanted)


def own(outputs, labels):
    return outputs["loss"]


def macro_f1(scores, labels):
    found = scores.argmax(1)
    pairs = [(found == c, labels == c) for c in range(3)]
    return sum(2 * (a & b).sum() / (a.sum() + b.sum()).clamp(min=1) for a, b in pairs) / 3


NUMBERS = Rows({"y": Y})
LOSSES = Rows({"labels": Y}, within=True)
RECIPES = {
    "a function of all samples": dict(
        model=lambda: Net(outputs=3), loss=F.cross_entropy, data=Rows({"y": CLASSES}),
        metrics={"f1": mpitrain.AllSamples(macro_f1)},
    ),
    "perplexity of a model's own loss": dict(
        model=lambda: Own("words"), loss="model", torchs=own, metrics=["perplexity"],
        data=Rows({"labels": WORDS}, within=True),
    ),
    "learned weights": dict(model=lambda: Own("weights"), loss="model", torchs=own, data=LOSSES),
    "a penalty": dict(model=lambda: Own("penalty"), loss="model", torchs=own, data=LOSSES),
    "several counts": dict(
        model=lambda: Net(lambda y: (y[:, :3], y[:, 3:]), 23), loss=two_counts, torchs=two_means,
        data=Rows({"classes": CLASSES, "words": WORDS}),
    ),
    "a batch larger than the data": dict(model=Net, loss=F.mse_loss, data=NUMBERS, batch=64),
    "a reentrant checkpoint": dict(model=reentrant, loss=F.mse_loss, data=NUMBERS),
    "a norm of one's own": dict(model=lambda: Net(norm=lambda: Activated(8)), norms=True),
    "a norm's own forward": dict(model=lambda: Net(norm=with_forward), norms=True),
    "no running values": dict(model=lambda: Net(norm=without_running), norms=True),
    "a norm as a function": dict(model=lambda: Net(norm=as_function), norms=True),
    "a data class": dict(model=lambda: Net(Found), loss=lambda o, y: F.mse_loss(o.scores, y)),
}  # fmt: skip


def torchs(model, loss=F.mse_loss, torchs=None, data=NUMBERS, batch=8, **rest):
    """Losses of the steps, and the module; batches of the order of the data."""
    torch.manual_seed(0)
    module = model().double()
    batches = [*torch.utils.data.DataLoader(data, batch)] * 2
    return loop(module, sgd, batches, partial(value_of, torchs or loss)), module.eval()


def value_of(loss, module, some):
    return loss(module(**some), None) if isinstance(some, dict) else loss(module(some[0]), some[1])


#: Each recipe in each layout, of which few are quick.
CASES = [
    (pytest.param if number % 6 == place else slow_case)(name, layout)
    for number, name in enumerate(RECIPES)
    for place, layout in enumerate(("data", "zero", "pipe"))
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_recipe_has_torchs_numbers(folder, name, layout):
    recipe = RECIPES[name]
    given = {"data": {}, "zero": {"parallel": {"zero": 3}}}.get(layout)
    if layout == "pipe":
        if RANKS % 2:
            pytest.skip("stages have equally many ranks")
        given = {"parallel": {"pipe": 2}, "cuts": ["enter"]}
        if not recipe.get("norms") and name != "a reentrant checkpoint":
            given["micro_batches"] = 2
    data, metrics = recipe.get("data", NUMBERS), recipe.get("metrics")
    found = []
    trainer = mpitrain.Trainer(
        model=lambda: recipe["model"]().double(), loss=recipe.get("loss", F.mse_loss),
        train_data=torch.utils.data.DataLoader(data, recipe.get("batch", 8)), test_data=data,
        metrics=metrics, optimizer=sgd, epochs=2, seed=0, run={"dir": str(folder / "run")}, **given,
    )  # fmt: skip
    with trainer:
        tests = trainer.fit(
            on_record=lambda record: isinstance(record, Step) and found.append(record.loss)
        )
        state = dict(trainer.module.state_dict())
    wanted, module = torchs(**recipe)
    assert found == pytest.approx(wanted, rel=1e-10)
    torch.testing.assert_close(state, dict(module.state_dict()), rtol=1e-9, atol=1e-12)
    every = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    batch_moments = {"no running values", "a norm as a function"}
    if name not in batch_moments:  # which are those of a test's batches
        loss = recipe.get("torchs") or recipe.get("loss", F.mse_loss)
        with torch.no_grad():
            value = value_of(loss, module, every).item()
            assert tests[-1].test_loss == pytest.approx(value, rel=1e-9)
            if metrics == ["perplexity"]:
                assert tests[-1].metrics == {"perplexity": pytest.approx(math.exp(value))}
            elif metrics:
                f1 = macro_f1(module(every[0]), every[1]).item()
                assert tests[-1].metrics == {"f1": pytest.approx(f1)}


def counted_by_outputs(outputs, labels):
    return [(outputs.square().sum(), len(outputs)), (outputs.sum(), (outputs > 0).sum())]


def failing(outputs, labels):
    raise KeyError("no such score")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"loss": counted_by_outputs}, "with counts that follow from the outputs"),
        ({"metrics": {"m": mpitrain.AllSamples(failing)}, "test_data": NUMBERS},
         "metrics: m fails for all test samples at once .*no such score"),
        ({"metrics": {"m": lambda o, y: (o - y).abs().max()}, "test_data": NUMBERS},
         r"mpitrain.AllSamples\(function\), which is called once, with all samples"),
        ({"train_data": torch.utils.data.DataLoader(NUMBERS, 64, drop_last=True)},
         "drop_last leaves all 22 samples out"),
    ],
)  # fmt: skip
def test_what_has_no_number_of_one_process_is_refused_on_all_ranks(comm, folder, changed, why):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    given = {"train_data": torch.utils.data.DataLoader(NUMBERS, 8), "loss": F.mse_loss, **changed}
    with pytest.raises((ConfigError, ValueError), match=why):
        mpitrain.Trainer(
            model=model, optimizer=sgd, epochs=1, run={"dir": str(folder / "run")}, **given
        ).fit()
