"""Losses that are means over what counts: one process's numbers, whichever rank has what counts."""

from functools import partial
from itertools import islice, product

import numpy as np
import pytest

from mpitrain.config import ConfigError
from mpitrain.group import share
from mpitrain.metrics.records import Skipped, Step
from mpitrain.update.agreement import NonFinite
from tests.cases import mostly_slow, slow_case
from tests.mpi.mpitrain import fits
from tests.mpi.mpitrain.fits import PARALLEL, RANKS, net, tensors, torch

F = torch.nn.functional
WEIGHT = torch.tensor([1.0, 0.5, 4.0, 0.1], dtype=torch.float64)


class Drawn(torch.utils.data.Dataset):
    """Samples of four classes, of which most are left out, so that some ranks have none.

    With ``masked``, several numbers a sample, of which a mask takes some.
    """

    def __init__(self, seed, samples=60, masked=False, left_out=0.6):
        draw = np.random.default_rng(seed)
        self.x, self.y = draw.normal(size=(samples, 6)), draw.integers(4, size=samples)
        self.y[draw.random(samples) < left_out] = -100
        self.numbers, self.masked = draw.normal(size=(samples, 4)), masked
        uniform = draw.random((samples, 4))
        self.mask = uniform < np.where(draw.random((samples, 1)) < left_out, 0.1, 0.8)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.masked:
            return self.x[index], {"y": self.numbers[index], "mask": self.mask[index]}
        return self.x[index], self.y[index]


def masked(outputs, labels):
    """Padding, or a mask: the sum and what counts."""
    if not labels["mask"].any():
        return 0.0, 0
    each = (outputs - labels["y"]).square() * labels["mask"]
    return each.sum(), labels["mask"].sum()


def weighed(outputs, labels):
    """Weights of samples that the labels give."""
    each = F.cross_entropy(outputs, labels, reduction="none")
    weights = torch.where(labels == 2, 3.0, 0.5) * (labels >= 0)
    return (each * weights).sum(), weights.sum()


LOSSES = {
    "ignored": torch.nn.CrossEntropyLoss(),
    "weighted": torch.nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1),
    "of a function": lambda y, t: F.nll_loss(F.log_softmax(y, 1), t, weight=WEIGHT),
    "partial": partial(F.cross_entropy, ignore_index=-100),
    "sum": torch.nn.CrossEntropyLoss(reduction="sum"),
    "weighed": weighed,
    "masked": masked,
}


def classifier():
    return net(4).double()


def made(folder, loss, data=None, **changed):
    data = data or Drawn(1, masked=loss is masked)
    given = {"model": classifier, "train_data": data, "loss": loss, "optimizer": sgd}
    given |= {"batch_size": 12, "test_data": None, "metrics": None}
    return fits.made(folder, **given | changed)


def steps_of(trainer):
    """Losses and norms of all steps, and the weights after them; taken once each."""
    told = [one for epoch in range(2) for one in trainer.run_epoch(epoch)]
    kept = [parameter.detach() for parameter in trainer.gather().parameters()]
    return [(one.loss, one.grad_norm) for one in told if isinstance(one, Step)], kept


plain = partial(torch.optim.SGD, lr=0.1)
sgd = partial(plain, momentum=0.9)


def torchs_own(trainer, loss, clip=np.inf, workers=1, optimizer=sgd, make=classifier):
    """As :func:`steps_of`, of torch's own loop in one process.

    With several ``workers``, each takes the mean of its share of a batch, and the mean of these,
    with the weights of their samples, is the loss.
    """
    torch.manual_seed(7)
    module = make()
    optimizer = optimizer(list(module.parameters()))
    data, told = trainer.parts.data.train, []
    for epoch in range(2):
        for batch in trainer.parts.sampler.batches(epoch):
            optimizer.zero_grad()
            value = 0.0
            for worker in range(workers):
                some = data[batch[share(len(batch), worker, workers)]]
                found = loss(module(torch.from_numpy(some.inputs).double()), tensors(some.labels))
                own = found[0] / found[1] if isinstance(found, tuple) else found
                own = own * len(some) / len(batch)
                (own * workers).backward()  # a worker sees the gradient of its own mean
                value += own.item()
            for parameter in module.parameters():
                parameter.grad /= workers
            told.append((value, torch.nn.utils.clip_grad_norm_(module.parameters(), clip).item()))
            optimizer.step()
    return told, [parameter.detach() for parameter in module.parameters()]


def assert_same(found, expected):
    told, weights = found
    wanted, others = expected
    np.testing.assert_allclose(told, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights, others, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", mostly_slow(LOSSES, ("weighted", "sum", "masked")))
def test_a_loss_has_the_numbers_of_torchs_own_loop(comm, folder, name):
    """Unequal counts in micro-batches; ranks in whose samples nothing counts; clipping."""
    loss, clip = LOSSES[name], 0.5
    how = {"parallel": PARALLEL, "micro_batches": 3}
    if name == "weighted":
        how = {"parallel": {"zero": 1}, "compress": {"codec": "topk:keep=1.0", "least": 1}}
    with made(folder, loss, **how, clip_norm=clip) as trainer:
        assert_same(steps_of(trainer), torchs_own(trainer, loss, clip))


#: So few are left out that each worker's small share keeps some.
FEW = 0.2 if RANKS < 5 else 0.02
LAYOUTS = {
    "micro-batches": {"micro_batches": 3},
    "zero 3": {"parallel": {"zero": 3}},
    "codec": {"compress": {"codec": "topk:keep=1.0", "least": 1}, "parallel": {"zero": 1}},
}


class Clamped(torch.nn.Linear):
    """Its backward pass is not linear."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-2e-3, 2e-3))
        return y


def clamped():
    return torch.nn.Sequential(Clamped(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()


@pytest.mark.parametrize(("how", "name"), [*zip(LAYOUTS, ("ignored", "weighted", "masked"))])
def test_a_backward_pass_that_clamps_sees_the_gradients_of_torch(comm, folder, name, how):
    """The count of the whole batch is known before the first micro-batch goes backward."""
    loss = LOSSES[name]
    data = Drawn(4, masked=loss is masked, left_out=FEW)
    with made(folder, loss, model=clamped, data=data, **LAYOUTS[how]) as trainer:
        assert_same(steps_of(trainer), torchs_own(trainer, loss, make=clamped))


WORKERS = {
    "local": {"sync": {"kind": "local", "period": 1}},
    "agree": {"sync": {"kind": "local", "period": 1, "agree": 3}},
    "first together": {"sync": {"kind": "local", "period": 3, "start": 10, "agree": 2}},
}
if RANKS > 1:
    WORKERS["server"] = {
        "server": {"ranks": 1, "bound": 0}, "optimizer": None,
        "optim": {"name": "sgd", "momentum": 0.0, "lr": 0.1, "reference_batch": 0},
    }  # fmt: skip


#: Each way, with one loss that is quick.
BOTH = ("masked", "ignored")
WAYS = mostly_slow(product(WORKERS, BOTH), zip(WORKERS, BOTH * 2))


@pytest.mark.parametrize(("how", "name"), WAYS)
def test_workers_take_means_over_what_counts_in_their_own_samples(comm, folder, how, name):
    """The mean of the workers' weights after each step is that of the mean of their gradients.

    Workers that take their first steps together have one mean.
    """
    loss, make = LOSSES[name], clamped if how == "local" else classifier
    given = {"data": Drawn(4, masked=loss is masked, left_out=FEW), "model": make}
    with made(folder, loss, **given | {"optimizer": plain} | WORKERS[how]) as trainer:
        told, weights = steps_of(trainer)
        workers = {"first together": 1, "server": RANKS - 1}.get(how, RANKS)
        wanted, others = torchs_own(trainer, loss, workers=workers, optimizer=plain, make=make)
        if how != "server":
            trainer.parts.drain()
            losses = ([loss for loss, _ in steps] for steps in (told, wanted))
            np.testing.assert_allclose(*losses, rtol=1e-10)
    rtol = 1e-10 if make is clamped else 1e-9
    torch.testing.assert_close(weights, others, rtol=rtol, atol=1e-12)


class Varying:
    """A mean over all labels, in a unit of its own in each call, that is in each step."""

    def __init__(self, unit):
        self.unit, self.calls, self.trains = unit, 0, False

    def __call__(self, outputs, labels):
        self.calls += self.trains
        unit = 1.0 + self.unit * (self.calls % 3)
        return F.cross_entropy(outputs, labels, reduction="sum") * unit, labels.numel() * unit


def test_codecs_keep_residuals_of_true_means(comm, folder):
    found, codec = [], {"codec": "topk:keep=0.2", "least": 1, "feedback": "on"}
    for unit in (0, 1):
        loss, data = Varying(unit), Drawn(3, left_out=0)
        with made(folder / str(unit), loss, data=data, compress=codec) as trainer:
            loss.trains = True  # it has been tried, where sums must add up
            found.append(steps_of(trainer))
    assert_same(*found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "changed",
    [
        dict(parallel={"zero": 2}, compress={"codec": "fp16", "least": 1}),
        dict(parallel={"pipe": RANKS, "schedule": "asynchronous"}, optimizer=None,
             optim={"name": "sgd", "lr": 0.1}, micro_batches=RANKS),
    ],
    ids=["zero and codec", "asynchronous"],
)  # fmt: skip
def test_gradients_that_are_used_before_counts_are_known(comm, folder, changed):
    """Labels may be left out, but not by what the outputs are."""

    def finite(outputs, labels):
        """As many as labels that count, for outputs that are there."""
        counts = (labels >= 0) & outputs.isfinite().all(1)
        return F.cross_entropy(outputs, labels, reduction="sum"), counts.sum()

    with made(folder, LOSSES["ignored"], **changed) as trainer:
        found, _ = steps_of(trainer)
        wanted, _ = torchs_own(trainer, LOSSES["ignored"])
    np.testing.assert_allclose(found[0][0], wanted[0][0], rtol=1e-6)
    with (
        made(folder / "other", finite, **changed) as trainer,
        pytest.raises(ConfigError, match=r"not every label of step \d+ counts 1, and parallel"),
    ):
        steps_of(trainer)


@pytest.mark.parametrize("codec", [slow_case("none"), "topk:keep=1.0"])
def test_a_batch_in_which_nothing_counts(comm, folder, codec):
    with made(folder, LOSSES["ignored"]) as trainer:
        batches = list(trainer.parts.sampler.batches(0))
    data = Drawn(1, left_out=0.2)
    data.y[batches[2]] = -100
    given = dict(data=data, compress={"codec": codec})
    with (
        made(folder / "other", LOSSES["ignored"], **given) as trainer,
        pytest.raises(NonFinite, match=r"at step 3 \(rank 0: nothing counts in the labels of its"),
    ):
        steps_of(trainer)
    given["run"] = {"on_nonfinite": "skip"}
    with made(folder / "again", LOSSES["ignored"], **given) as trainer:
        assert [one.step for one in list(trainer.run_epoch(0)) if isinstance(one, Skipped)] == [3]
        assert trainer.parts.updater.steps == len(batches) - 1


def test_tests_and_metrics_are_over_what_counts(comm, folder):
    """Labels that the loss leaves out do not count in metrics by name; functions say so."""
    test = Drawn(9, samples=31)

    def hits(outputs, labels):
        counts = labels >= 0
        return (outputs.argmax(1) == labels)[counts].sum(), counts.sum()

    kinds = (["accuracy", "perplexity", "top2", "f1"], {"hits": hits, "its mean": F.cross_entropy})
    for number, metrics in enumerate(kinds):
        changed = {"metrics": metrics, "test_data": test}
        with made(folder / str(number), LOSSES["ignored"], **changed) as trainer:
            last = trainer.fit()[-1]
        outputs, labels = trainer.module(torch.from_numpy(test.x)), torch.from_numpy(test.y)
        mean = F.cross_entropy(outputs, labels).item()
        right, counted = hits(outputs, labels)
        assert last.test_loss == pytest.approx(mean, rel=1e-10)
        if number:
            assert last.metrics["its mean"] == pytest.approx(mean, rel=1e-10)
        else:
            assert last.metrics["perplexity"] == pytest.approx(np.exp(mean), rel=1e-9)
        found = last.metrics["hits" if number else "accuracy"]
        assert found == pytest.approx(right.item() / counted.item(), rel=1e-12)


class Segments(Drawn):
    """A class for each of four places, of which some do not count."""

    def __getitem__(self, index):
        x = torch.from_numpy(self.x[index])
        classes = (x[:4] > 0).long() + 3 * (x[:4] > 1).long()
        return x, torch.where(x[:4] > -1, classes, 255)


def segments(classes):
    parts = torch.nn.Linear(6, 4 * classes), torch.nn.Unflatten(1, (classes, 4))
    return lambda: torch.nn.Sequential(*parts).double()


def test_scores_of_classes_may_be_the_first_axis(comm, folder):
    """As torch's own loss has them: the number of classes and metrics by name go by it."""
    test, loss = Segments(2, 30), torch.nn.CrossEntropyLoss(ignore_index=255)
    given = dict(data=Segments(1, 48), test_data=test, epochs=1, metrics=["accuracy"])
    with made(folder, loss, model=segments(5), **given) as trainer:
        (told,) = trainer.fit()
        x, labels = (torch.stack(part) for part in zip(*(test[i] for i in range(30))))
        counts = labels != 255
    with torch.no_grad():
        right = trainer.module(x).argmax(1) == labels
    assert told.metrics["accuracy"] == right[counts].double().mean().item()
    with pytest.raises(ConfigError, match="nobody knows along which axis they lie"):
        made(folder, loss, model=segments(4), **given)


def guarded(outputs, labels):
    """A mean over labels that count by hand, which nobody sees through."""
    return F.cross_entropy(outputs, labels, reduction="sum") / (labels >= 0).sum().clamp(min=1)


@pytest.mark.parametrize("size", [RANKS, 4 * RANKS])
def test_one_rank_that_sees_a_label_left_out_stops_all_before_the_update(comm, folder, size):
    """Also where each rank has a single sample."""
    data = Drawn(1, 48, left_out=0)
    data.y[17] = -100
    with made(folder, guarded, data=data, batch_size=size, classes=4, shadow=0) as trainer:
        with pytest.raises(ConfigError, match=r"step \d+: loss: guarded of .*return \(sum, count"):
            trainer.fit()
        step = trainer.parts.steps_done + 1
        assert 17 in next(islice(trainer.parts.sampler.batches(0), step - 1, None))
        assert trainer.parts.updater.steps == step - 1
