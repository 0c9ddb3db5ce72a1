"""Losses and metrics of torch are means over samples, or refused at the step that shows it."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpitrain.adapters.torch.functions.equal_weights import EqualWeights
from mpitrain.adapters.torch.functions.objective import TorchLoss, TorchMetric

F = torch.nn.functional
#: Labels above it are rare, and unknown to whoever tries the loss before there are data.
RARE = 1.5


def errors(outputs, labels):
    return (outputs - labels).square().mean(1)


def weighed(weight, guard=0.0):
    """A mean over what counts, of which rare samples count so much."""

    def loss(outputs, labels):
        weights = torch.where(labels[:, 0] > RARE, weight, 1.0)
        return (weights * errors(outputs, labels)).sum() / weights.sum().clamp(min=guard)

    return loss


def padded(outputs, labels):
    """A mean over numbers, of which rare ones do not count."""
    counts = (labels <= RARE).to(outputs.dtype)
    return ((outputs - labels).square() * counts).sum() / counts.sum().clamp(min=1.0)


def hardest(outputs, labels):
    """The mean of the larger half."""
    found = errors(outputs, labels)
    return found.topk(max(1, len(found) // 2)).values.mean()


def total(outputs, labels):
    found = errors(outputs, labels)
    return found.sum() if bool((labels > RARE).any()) else found.mean()


LOSSES = [
    weighed(0.0), weighed(0.0, 1.0), weighed(0.5), weighed(1.0), weighed(20.0), padded, hardest,
    total,
]  # fmt: skip


def parts_of(count, cuts):
    """Slices of so many samples, between the cuts."""
    ends = sorted({cut % (count + 1) for cut in cuts} | {0, count})
    return [slice(a, b) for a, b in pairwise(ends)]


@settings(max_examples=100, deadline=None)
@given(
    loss=st.sampled_from(LOSSES),
    rare=st.lists(st.booleans(), min_size=1, max_size=9),
    whole=st.booleans(),
    cuts=st.lists(st.integers(0, 9), max_size=8),
    kind=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 99),
)
def test_a_loss_of_parts_is_that_of_all_or_refused(loss, rare, whole, cuts, kind, seed):
    """Whichever rank and micro-batch has which samples."""
    rng, count = np.random.default_rng(seed), len(rare)
    outputs, labels = rng.random((2, count, 3)).astype(kind)
    labels[rare, : 3 if whole else 1] += 2
    value, gradient, faults = 0.0, [], []
    for part in parts_of(count, cuts):
        of_rank = TorchLoss(loss)
        try:
            of_rank.expect((3,), (3,), np.dtype(kind))
        except ValueError as error:
            assert loss in (hardest, total)
            assert "a mean over samples with equal weights" in str(error)
            return
        found, by = of_rank(outputs[part], labels[part], labels.size)
        value, gradient = value + found, [*gradient, by]
        faults.append(of_rank.fault)
    if any(faults):
        return
    scores = torch.from_numpy(outputs).requires_grad_()
    expected = loss(scores, torch.from_numpy(labels))
    expected.backward()
    close = dict(rtol=1e-4, atol=1e-7) if kind == np.float32 else dict(rtol=1e-6, atol=1e-12)
    if np.isfinite(value):
        np.testing.assert_allclose(np.concatenate(gradient), scores.grad, **close)
        np.testing.assert_allclose(value, expected.item(), **close)


def of_pixels(outputs, labels):
    """Classes on the last axis."""
    return F.cross_entropy(outputs.movedim(-1, 1), labels, weight=WEIGHT[:3])


WEIGHT = torch.tensor([1.0, 0.2, 5.0, 0.0, 3.0], dtype=torch.float64)
#: Losses, and the shapes of an output and of a label.
OF_CLASSES = {
    "positions": (torch.nn.CrossEntropyLoss(WEIGHT, ignore_index=1), (5, 4), (4,)),
    "pixels": (of_pixels, (4, 3), (4,)),
    "sums": (lambda y, t: (F.cross_entropy(y, t, reduction="sum"), (t >= 0).sum()), (5,), ()),
}


@pytest.mark.parametrize("name", OF_CLASSES)
@pytest.mark.parametrize("seed", range(2))
def test_sums_and_counts_of_parts_give_torchs_mean(name, seed):
    """Losses that the package knows, and one that says them."""
    loss, shape, of_label = OF_CLASSES[name]
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(12, *shape))
    labels = rng.integers(3, size=(12, *of_label))
    labels[rng.random(labels.shape) < 0.5] = 1 if name == "positions" else -100
    scores = torch.from_numpy(outputs).requires_grad_()
    mean = loss(scores, torch.from_numpy(labels))
    mean = mean[0] / mean[1] if isinstance(mean, tuple) else mean
    mean.backward()
    own = TorchLoss(loss)
    own.expect(shape, of_label, labels.dtype)
    assert own.reduction == "count"
    assert own.ignore_index == (1 if name == "positions" else -100)
    found = [
        own(outputs[part], labels[part], 7.0) for part in parts_of(12, rng.integers(12, size=4))
    ]
    counted = sum(count for _, _, count in found) / 7
    assert own.fault is None
    np.testing.assert_allclose(sum(value for value, *_ in found) / counted, mean.item(), rtol=1e-12)
    by = np.concatenate([gradient for _, gradient, _ in found]) / counted
    np.testing.assert_allclose(by, scores.grad, rtol=1e-10, atol=1e-14)


def in_place(outputs, labels):
    """A sum of torch's that is divided: no mean that is known."""
    loss = F.mse_loss(outputs, labels, reduction="sum")
    loss /= labels.numel()
    return loss


KNOWN = {
    "mean": [
        torch.nn.MSELoss(), torch.nn.L1Loss(), torch.nn.SmoothL1Loss(), torch.nn.HuberLoss(),
        torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 0.1, 9.0])), F.mse_loss,
        torch.nn.KLDivLoss(reduction="batchmean"), torch.nn.CrossEntropyLoss(torch.ones(3)),
        torch.nn.MultiLabelSoftMarginLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        torch.nn.KLDivLoss(), in_place,
    ],
    "sum": [torch.nn.MSELoss(reduction="sum"), partial(F.l1_loss, reduction="sum")],
    "count": [lambda y, t: F.mse_loss(y, t, weight=t), lambda y, t: F.l1_loss(y, t, weight=t)],
}  # fmt: skip


@pytest.mark.parametrize(("how", "loss"), [(how, one) for how in KNOWN for one in KNOWN[how]])
def test_losses_that_are_known_are_not_tried(how, loss, monkeypatch):
    if loss is not in_place:
        monkeypatch.setattr(EqualWeights, "compare", None)
    own, rng = TorchLoss(loss), np.random.default_rng(0)
    own.expect((3,), (3,), np.dtype("f4"))
    assert own.reduction == how
    outputs, labels = rng.random((2, 9, 3)).astype("f4")
    divisor = 27 if how == "mean" else 1
    found = [own(outputs[part], labels[part], divisor) for part in parts_of(9, [2, 5])]
    counted = sum(count for _, _, count in found) if how == "count" else 1
    expected = loss(torch.from_numpy(outputs), torch.from_numpy(labels)).item()
    assert sum(value for value, *_ in found) / counted == pytest.approx(expected, rel=1e-5)
    assert own.fault is None


def known_and_more(outputs, labels):
    loss = F.mse_loss(outputs, labels)
    loss += outputs.norm()
    return loss


CENTRE = torch.zeros(3)


def centred(outputs, labels):
    CENTRE.lerp_(outputs.detach().to(CENTRE).mean(0), 0.1)
    return F.mse_loss(outputs, labels) * CENTRE.exp().sum()


def noisy(outputs, labels):
    return (outputs + torch.randn_like(outputs) - labels).square()


#: Functions that are no losses, by the sentence that refuses them.
REFUSED = {
    r"a tensor of shape \(2, 3\); .* or \(sum, count\)": [torch.nn.MSELoss(reduction="none")],
    "gives -1 as its count": [lambda y, t: ((y - t).sum(), -1)],
    "gives a str as its count": [lambda y, t: ((y - t).sum(), "all")],
    r"a count with a gradient.*detach\(\)": [lambda y, t: ((y - t).sum(), y.sum())],
    "gives a tuple": [lambda y, t: (y, t, 1)],
    "must be a mean over samples": [
        lambda y, t: F.mse_loss(y[t > 0.39], t[t > 0.39]),
        lambda y, t: F.mse_loss(y - y.mean(0), t),
        lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=1 / t.mean(0)),
        known_and_more,
    ],
    "as the sum of 4 samples.* must add up": [
        lambda y, t: F.cross_entropy(y @ t.T, torch.arange(len(y))),
        lambda y, t: (F.mse_loss(y, t), 1),
    ],
    "as the count .* must add up": [lambda y, t: (F.mse_loss(y, t, reduction="sum"), 1)],
    r"keeps something from call to call.*\(it is .* and then .* in on_record": [centred],
    "draws random numbers, and would be another one in every layout; draw them": [
        lambda y, t: noisy(y, t).mean(), lambda y, t: (noisy(y, t).sum(), len(y)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("why", "loss"), [(why, one) for why in REFUSED for one in REFUSED[why]])
def test_what_is_no_loss_is_refused_before_training(why, loss):
    with pytest.raises(ValueError, match=why):
        TorchLoss(loss).expect((3,), (3,), np.dtype("f4"))


def test_a_loss_that_broadcasts_samples_against_samples_is_refused():
    """torch does not warn of this one."""
    why = r"outputs of shape \(2, 1\) with labels of \(2,\), each sample with all others; give both"
    with pytest.raises(ValueError, match=why):
        TorchLoss(F.poisson_nll_loss).expect((1,), (), np.dtype("f4"))


def test_a_loss_that_is_a_sum_and_count_now_and_then():
    def loss(outputs, labels):
        each = (outputs - labels).square()
        return (each.sum(), each.numel()) if bool((labels > RARE).any()) else each.mean()

    own = TorchLoss(loss)
    own.expect((3,), (3,), np.dtype("f8"))
    own(np.zeros((2, 3)), np.full((2, 3), 2.0), 6.0)
    assert "gives a mean for some samples and a sum and what counts for others" in str(own.fault)


def test_a_loss_that_changes_its_labels_is_told():
    loss = TorchLoss(lambda y, t: F.cross_entropy(y, t.clamp_(max=1)))
    loss.expect((4,), (), np.dtype(int))
    loss(np.zeros((1, 4)), np.array([2]), 1.0)
    assert "let it work on labels.clone()" in str(loss.fault)


@pytest.mark.parametrize("kind", ["i8", "?"])
def test_labels_that_are_no_fractions_have_the_type_of_the_outputs(kind):
    loss, outputs = TorchLoss(F.binary_cross_entropy_with_logits), np.ones((3, 1))
    loss.expect((1,), (1,), np.dtype(kind))
    labels = np.array([[0], [1], [0]], kind)
    assert loss(outputs, labels, 3.0)[0] == loss(outputs, labels.astype(float), 3.0)[0]


@settings(max_examples=60, deadline=None)
@given(
    rare=st.lists(st.booleans(), min_size=2, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=6),
    weight=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    seed=st.integers(0, 99),
)
@example(rare=[False, *5 * [True]], cuts=[1], weight=0.5, seed=1)
def test_a_metric_of_parts_is_that_of_all_or_refused(rare, cuts, weight, seed):
    def metric(outputs, labels):
        weights = torch.where(labels > RARE, weight, 1.0)
        return ((outputs > 0.5) * weights).sum() / weights.sum().clamp(min=1e-9)

    rng, count = np.random.default_rng(seed), len(rare)
    outputs, labels = rng.random((2, count))
    labels[rare] += 2
    of_rank = TorchMetric(metric, "right")
    # The first samples show two values: where all are equal, so is every mean.
    parts = [slice(0, 1), slice(1, 2), *parts_of(count, cuts)]
    firsts = np.array([0.2, 0.8]), np.array([0.1, 0.1])
    totals = sum(of_rank.add(firsts[0][p], firsts[1][p]) for p in parts[:2])
    totals = totals + sum(of_rank.add(outputs[part], labels[part]) for part in parts[2:])
    if of_rank.fault is not None:
        assert weight != 1.0
        return
    every = (np.concatenate([a, b]) for a, b in zip(firsts, (outputs, labels), strict=True))
    expected = metric(*map(torch.from_numpy, every)).item()
    assert of_rank.value(totals) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda outputs, labels: outputs.max(), "return .sum, count"),
        (lambda outputs, labels: outputs.squeeze().sum(0)[0], "it must take any, as layouts"),
        (lambda y, t: ((y - t).abs().mean(), 1), "as the sum of 8 samples.* must add up"),
        (lambda y, t: F.cross_entropy(y - y.mean(0), (t[:, 0] > 0.5).long()), "must add up"),
    ],
)
def test_metrics_that_are_no_means(metric, message):
    of_rank, rng = TorchMetric(metric, "rmse"), np.random.default_rng(0)
    of_rank.add(*rng.random((2, 4, 3)))
    with pytest.raises(ValueError, match=f"metrics: rmse: <lambda> .*{message}"):
        raise of_rank.fault
