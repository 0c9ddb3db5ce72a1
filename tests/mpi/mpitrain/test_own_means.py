"""Losses and metrics that are no means over samples would be others in every layout: an error."""

from itertools import islice

import pytest
from mpi4py import MPI

from mpitrain.config import ConfigError
from mpitrain.data import DataError
from tests.mpi.mpitrain.fits import Waves, made

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
pytestmark = pytest.mark.mpi
RANKS = MPI.COMM_WORLD.size


class Tokens(Waves):
    """As many ids as labels, of which every second sample leaves some out, as -100."""

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        ids, labels = torch.randint(9, (2, 6), generator=draw)
        labels[: 3 * (index % 2)] = -100
        return {"input_ids": ids}, {"labels": labels}


class Language(torch.nn.Module):
    """Outputs by name, as of transformers; the embedding is the head, too."""

    def __init__(self, more=None):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 8)
        self.head = torch.nn.Linear(8, 9, bias=False)
        self.head.weight, self.more = self.embedding.weight, more

    def forward(self, input_ids):
        logits = self.head(self.embedding(input_ids))
        return {"logits": logits} | ({"more": self.more(logits)} if self.more else {})


def ignoring(outputs, labels):
    return torch.nn.functional.cross_entropy(
        outputs["logits"].flatten(0, 1), labels["labels"].flatten(), ignore_index=-100
    )


def guarded(outputs, labels):
    """The same mean by hand, which nobody sees through."""
    return ignoring(outputs, labels) + 0.0


def place(folder, comm):
    """Of a run; one for each rank where each runs alone."""
    return str(folder / ("all" if comm is not MPI.COMM_SELF else f"alone{MPI.COMM_WORLD.rank}"))


def language(**changed):
    given = dict(model=Language, train_data=Tokens(48, 1), test_data=None, metrics=None)
    return given | dict(loss=ignoring, dtype="float64", epochs=1) | changed


def assert_as_in_one_process(folder, comm, **given):
    found = []
    for where in (comm, MPI.COMM_SELF):
        with made(folder, **given, comm=where, dir=place(folder, where)) as trainer:
            trainer.fit()
            found.append([p.detach() for p in trainer.module.parameters()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


class Segments(Waves):
    """A class for each of four places, of which some do not count."""

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        classes = (x[:4] > 0).long() + 3 * (x[:4] > 1).long()
        return x, torch.where(x[:4] > -1, classes, 255)


def segments(classes):
    return lambda: torch.nn.Sequential(
        torch.nn.Linear(6, 4 * classes), torch.nn.Unflatten(1, (classes, 4))
    )


def test_scores_of_classes_may_be_the_first_axis(comm, folder):
    """As torch's own loss has them: the number of classes and metrics by name go by it."""
    given = dict(train_data=Segments(48, 1), test_data=Segments(30, 2), epochs=1)
    given |= dict(loss=torch.nn.CrossEntropyLoss(ignore_index=255))
    with made(folder, model=segments(5), metrics=["accuracy"], **given) as trainer:
        (told,) = trainer.fit()
        x, labels = (torch.stack(part) for part in zip(*(given["test_data"][i] for i in range(30))))
        counts = labels != 255
    assert 0 < counts.sum() < counts.numel()
    with torch.no_grad():
        right = trainer.module.double()(x.double()).argmax(1) == labels
    assert told.metrics["accuracy"] == right[counts].double().mean().item()
    with pytest.raises(ConfigError, match="nobody knows along which axis they lie"):
        made(folder, model=segments(4), metrics=["accuracy"], **given)


def test_labels_that_are_left_out(comm, folder):
    assert_as_in_one_process(folder, comm, **language())


@pytest.mark.parametrize("size", [RANKS, 4 * RANKS])
def test_one_rank_that_sees_a_label_left_out_stops_all_before_the_update(comm, folder, size):
    """Also where each rank has a single sample."""

    class Rare(Tokens):
        def __getitem__(self, index):
            ids, labels = super().__getitem__(index)
            labels["labels"][:] = labels["labels"].abs() % 9
            labels["labels"][-1] = -100 if index == 17 else 3
            return ids, labels

    given = language(loss=guarded, train_data=Rare(48, 1), batch_size=size)
    with made(folder, **given) as trainer:
        with pytest.raises(ConfigError, match=r"step \d+: loss: guarded of .*return \(sum, count"):
            trainer.fit()
        step = trainer.parts.steps_done + 1
        assert 17 in next(islice(trainer.parts.sampler.batches(0), step - 1, None))
        assert trainer.parts.updater.steps == step - 1


class Counts(Waves):
    """Whole numbers as labels, of so many kinds."""

    def __init__(self, count, seed, kind=int, shape=()):
        super().__init__(count, seed)
        self.kind, self.shape = kind, shape

    def __getitem__(self, index):
        return super().__getitem__(index)[0], torch.full(self.shape, index % 3).to(self.kind)


def linear(outputs):
    return lambda: torch.nn.Linear(6, outputs).double()


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (torch.int64, torch.nn.MSELoss),
        (torch.bool, torch.nn.functional.binary_cross_entropy_with_logits),
    ],
)
def test_labels_that_are_numbers_have_the_type_of_the_outputs(comm, folder, kind, loss):
    """The loss may be a class."""
    found = []
    for to in (kind, torch.float64):
        data = Counts(48, 1, kind, (1,))
        get = data.__getitem__
        given = dict(train_data=data, test_data=None, metrics=None, epochs=1, loss=loss)
        if to == torch.float64:
            given["train_data"] = [(get(i)[0], get(i)[1].double()) for i in range(48)]
        with made(folder, model=linear(1), **given) as trainer:
            trainer.fit()
            found.append([p.detach() for p in trainer.module.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_lazy_modules_of_any_type_get_their_shapes(comm, folder, kind):
    def model():
        return torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyLinear(1)).to(kind)

    given = dict(model=model, test_data=None, metrics=None, epochs=1)
    with made(folder, **given) as trainer:
        assert trainer.module[0].weight.dtype == kind
        assert trainer.module[0].weight.shape == (3, 6)


def frozen():
    return torch.nn.Linear(6, 1).requires_grad_(False)


class Sample(Waves):
    """Another form for one sample."""

    def __init__(self, other):
        super().__init__(48, 1)
        self.other = other

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return self.other(x, y) if index else (x, y)


class Left(Counts):
    """A label that nothing leaves out."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0], torch.tensor(-1 if index == 5 else 1)


def of_classes(outputs, data):
    loss = torch.nn.CrossEntropyLoss()
    return dict(model=linear(outputs), train_data=data, loss=loss, metrics=None, test_data=None)


def samples_of(other):
    return dict(train_data=Sample(other), test_data=None, metrics=None)


REFUSED = [
    (dict(metrics={"rmse": lambda y, t: (y - t).square().mean().sqrt()}),
     ConfigError, "metrics: rmse: <lambda> of"),
    (language(model=lambda: Language(lambda logits: logits.sum())),
     ConfigError, "its output 'more' is a single number, and no mean"),
    (dict(model=frozen), ConfigError, "all of its parameters are frozen.*unfreeze"),
    (dict(metrics={"loss": max}), ConfigError, "'loss' is the name of the mean loss.*choose anoth"),
    (dict(metrics={"words": lambda y, t: "none"}),
     ConfigError, "test: metrics: words gives a str; it must"),
    (dict(loss=lambda y, t: y.sub_(t).square().mean()), ConfigError, r"work on outputs\.clone"),
    (of_classes(2, Counts(48, 1)),
     DataError, "or floating-point numbers where they are no classes"),
    (of_classes(3, Left(48, 1)),
     DataError, r"sample 5 to train on has the label -1, .*ignore_index"),
    (samples_of(lambda x, y: (x, y, 1.0)),
     DataError, "'0': float64 of shape .* that of sample 0 float64 of shape"),
    (samples_of(lambda x, y: (x[1:], y)),
     DataError, "all must be alike, or collate_fn= must make batches of them"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "why"), REFUSED, ids=[why for *_, why in REFUSED])
def test_what_a_job_cannot_do_is_one_sentence(comm, folder, changed, error, why):
    with (
        pytest.raises(error, match=why),
        made(folder, **{"epochs": 1, **changed}) as trainer,
    ):
        trainer.fit()
