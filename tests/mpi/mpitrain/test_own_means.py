"""Losses and metrics that are no means over samples would be others in every layout: an error."""

import pytest
from mpi4py import MPI

from mpitrain.config import ConfigError
from mpitrain.data import DataError
from tests.mpi.mpitrain.test_fit import Waves, made

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


def counting(outputs, labels):
    """What is left out counts as 0."""
    return ignoring(outputs, labels) * (labels["labels"] >= 0).double().mean()


def place(folder, comm):
    """Of a run; one for each rank where each runs alone."""
    return str(folder / ("all" if comm is not MPI.COMM_SELF else f"alone{MPI.COMM_WORLD.rank}"))


def language(folder, **changed):
    given = dict(model=Language, train_data=Tokens(48, 1), test_data=None, metrics=None)
    return made(folder, **(given | dict(loss=counting, dtype="float64", epochs=1) | changed))


def test_labels_that_are_left_out(comm, folder):
    with (
        pytest.raises(ConfigError, match=r"loss: ignoring of \d+ samples is .*labels that it leav"),
        language(folder, loss=ignoring) as trainer,
    ):
        trainer.fit()
    found = []
    for where in (comm, MPI.COMM_SELF):
        with language(folder, comm=where, dir=place(folder, where)) as trainer:
            trainer.fit()
            found.append([p.detach() for p in trainer.module.parameters()])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_samples_without_any_label(comm, folder):
    """Alone they have no mean at all."""

    class Bare(Tokens):
        def __getitem__(self, index):
            ids, labels = super().__getitem__(index)
            labels["labels"][:] = -100 if index % 2 else labels["labels"].abs()
            return ids, labels

    with (
        pytest.raises(ConfigError, match=r"loss: ignoring of .* and the mean over them nan"),
        language(folder, loss=ignoring, train_data=Bare(48, 1)) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize("name", ["rmse", pytest.param("maximum", marks=pytest.mark.slow)])
def test_metrics_that_are_no_means(comm, folder, name):
    of = {
        "rmse": lambda y, t: (y - t).square().mean().sqrt(),
        "maximum": lambda y, t: (y - t).abs().max(),
    }
    with (
        pytest.raises(ConfigError, match=f"metrics: {name}: <lambda> of"),
        made(folder, metrics={name: of[name]}, epochs=1) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (lambda logits: "none", "its output 'more' is a str; all outputs are tensors"),
        (lambda logits: logits.sum(), "its output 'more' is a single number; outputs have one"),
    ],
)
def test_outputs_that_cannot_be(comm, folder, more, why):
    with pytest.raises(ConfigError, match=why):
        language(folder, model=lambda: Language(more))


class Lengths(Waves):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x[:, None].float(), "lengths": index % 6 + 1}, y.float()


class Packed(torch.nn.Module):
    """Sequences of unequal lengths."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = torch.nn.LSTM(1, 4, batch_first=True), torch.nn.Linear(4, 1)

    def forward(self, x, lengths):
        options = dict(batch_first=True, enforce_sorted=False)
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, **options)
        _, (last, _) = self.inner(packed)
        return self.out(last[0])


@pytest.mark.slow
def test_packed_sequences(comm, folder):
    found = []
    for where in (comm, MPI.COMM_SELF):
        given = dict(model=Packed, train_data=Lengths(48, 1), test_data=None, metrics=None)
        given |= dict(epochs=1, comm=where, dir=place(folder, where))
        with made(folder, **given) as trainer:
            trainer.fit()
            found.append([p.detach() for p in trainer.module.parameters()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def test_whole_numbers_are_classes_unless_they_are_said_to_be_numbers(comm, folder):
    class Counts(Waves):
        def __getitem__(self, index):
            return super().__getitem__(index)[0], index % 3

    with (
        pytest.raises(DataError, match="or floating-point numbers where they are no classes"),
        made(folder, train_data=Counts(48, 1), test_data=None, metrics=None) as trainer,
    ):
        trainer.fit()
