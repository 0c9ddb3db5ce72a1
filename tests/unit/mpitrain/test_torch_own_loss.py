"""``loss="model"``: the loss that a module computes itself is trained as in one batch."""

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpitrain
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from tests.mpi.mpitrain.fits import loop

nn, F = torch.nn, torch.nn.functional


class Words(torch.utils.data.Dataset):
    """Dictionaries; many labels do not count, and some samples have none that do."""

    def __init__(self, samples=24, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, 7, (samples, 5), generator=draw)
        drawn, limits = (torch.rand(samples, n, generator=draw) for n in (5, 1))
        self.counts = drawn < limits
        self.counts[:4] = False

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"words": self.words[i], "labels": torch.where(self.counts[i], self.words[i], -100)}


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    scores: torch.Tensor
    cache: object = None


class Model(nn.Module):
    """Gives its loss in some form."""

    def __init__(self, form="dictionary"):
        super().__init__()
        self.form = form
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.register_buffer("weights", torch.linspace(0.5, 2.0, 7), persistent=False)

    def forward(self, words, labels=None, use_cache=True):
        assert not use_cache
        scores = self.head(torch.tanh(self.embed(words)).cumsum(1))
        flat, truth = scores.flatten(0, 1), labels.flatten()
        if self.form == "by hand":
            return {"loss": scores.square().mean()}
        loss = F.cross_entropy(flat, truth)
        match self.form:
            case "dictionary":
                return {"loss": loss, "scores": scores, "cache": None, "seen": [1, 2]}
            case "class":
                return Result(loss, scores, object())
            case "tuple":
                return scores, loss, None
            case "alone":
                return loss
            case "weights":
                return {"loss": F.cross_entropy(flat, truth, self.weights, label_smoothing=0.1)}
            case "several":
                other = nn.CrossEntropyLoss()(flat.roll(1, 1), truth)
                F.mse_loss(scores, torch.zeros_like(scores))  # is not in the loss
                return {"loss": (loss + other) / 2}
            case "weighed numbers":
                weight = (1.0 + words)[..., None].expand_as(scores).to(scores)
                return {"loss": F.l1_loss(scores, F.one_hot(words, 7).to(scores), weight=weight)}
            case "ctc":
                lengths, chances = (labels > 0).sum(1), scores.log_softmax(-1).transpose(0, 1)
                given = chances, labels[labels > 0], torch.full_like(lengths, 5), lengths
                return {"loss": F.ctc_loss(*given, zero_infinity=True)}
            case "in place":
                loss *= 0.5
                loss += F.cross_entropy(flat.roll(1, 1), truth)
                return {"loss": loss}
            case "contrast":
                means = scores.mean(1)
                return {"loss": F.cross_entropy(means @ means.T, torch.arange(len(words)))}
            case "other counts":
                return {"loss": loss + F.mse_loss(scores, torch.zeros_like(scores))}
            case "penalty":
                loss += 0.01 * scores.square().mean()
                return {"loss": loss}
            case "none":
                return {"scores": scores}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def trainer(folder, form, **given):
    given = {"loss": "model", "train_data": Words(), "micro_batches": 3, **given}
    return mpitrain.Trainer(
        MPI.COMM_SELF, model=lambda: Model(form).double(), optimizer=sgd, batch_size=12, epochs=2,
        seed=3, dir=str(folder / "run"), log_every=1000, **given,
    )  # fmt: skip


def loss_of(found):
    if isinstance(found, Result):
        return found.loss
    if isinstance(found, dict):
        return found["loss"]
    return found[1] if isinstance(found, tuple) else found


def alone(made, form):
    """Losses of torch's own loop on the same batches."""

    def loss(model, batch):
        some = torch.utils.data.default_collate([data[i] for i in batch])
        return loss_of(model(**some, use_cache=False))

    torch.manual_seed(3)
    data, batches = Words(), made.parts.sampler.batches
    return loop(Model(form).double(), sgd, [*batches(0), *batches(1)], loss)


FORMS = [
    "dictionary", "class", "tuple", "alone", "weights", "several", "weighed numbers", "ctc",
    "in place",
]  # fmt: skip
#: Also a function that gives the model's loss as it is.
CASES = [*product(FORMS, ["model"]), ("dictionary", lambda outputs, labels: outputs["loss"])]


@pytest.mark.parametrize(("form", "loss"), CASES)
def test_the_mean_is_over_what_counts_in_the_batch(tmp_path, form, loss):
    with trainer(tmp_path, form, loss=loss) as made:
        found = [record.loss for epoch in range(2) for record in made.run_epoch(epoch)]
        np.testing.assert_allclose(found, alone(made, form), rtol=1e-12)


def test_a_metric_may_be_the_models_own_loss(tmp_path):
    given = {"test_data": Words(24, 1), "metrics": {"own": lambda outputs, labels: outputs["loss"]}}
    with trainer(tmp_path, "dictionary", **given) as made:
        test = made.fit()[-1]
    assert test.metrics["own"] == pytest.approx(test.test_loss, rel=1e-12)


ALONE = "step 1: the (loss|gradient of .*) is .*torch"
REFUSED = {
    "other counts": "a loss of several means, over other parts of what counts",
    "penalty": "adds other things to its loss than means by torch's own losses",
    "contrast": ALONE,
    "by hand": "'loss' is a single number, and no mean by torch's own losses",
    "none": "the model gives no loss itself; give it labels",
    "dictionary": r"must be a mean over samples with equal weights.*return \(sum, count\)",
}


@pytest.mark.parametrize("form", REFUSED)
def test_a_loss_that_would_be_another_in_each_layout_is_refused(tmp_path, form):
    twice = {"loss": lambda outputs, labels: 2 * outputs["loss"]}
    given, error = twice if form == "dictionary" else {}, (ConfigError, DataError)
    with pytest.raises(error, match=REFUSED[form]), trainer(tmp_path, form, **given) as made:
        made.fit()
