"""Metrics against scikit-learn, added up from parts."""

import numpy as np
import pytest

from mpitrain.config.metric_names import NAMES, refusal, usual
from mpitrain.group import TensorGroup
from mpitrain.objective.metrics import AllSamples, build

ALONE = TensorGroup()


@pytest.fixture(scope="module")
def sklearn():
    return pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")


def measured(name, outputs, labels, loss="cross_entropy", classes=0, ignored=None):
    metric = build([name], loss, classes, ALONE, ignored)[name]
    parts = np.s_[:0, :1, 1:3, 3:20, 20:]
    return metric.value(sum(metric.add(outputs[part], labels[part]) for part in parts))


@pytest.fixture
def scored():
    rng = np.random.default_rng(0)
    return rng.normal(size=(50, 7)), rng.integers(6, size=50)  # class 6 never occurs


def test_scores(sklearn, scored):
    scores, labels = scored
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    top = sklearn.top_k_accuracy_score
    expected = {f"top{k}": top(labels, scores, k=k, labels=range(7)) for k in (1, 2, 5)}
    expected["accuracy"] = expected["top1"]
    expected["f1"] = sklearn.f1_score(labels, scores.argmax(axis=1), average="macro")
    expected["perplexity"] = np.exp(sklearn.log_loss(labels, chances, labels=range(7)))
    found = {name: measured(name, scores, labels, classes=7) for name in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ["accuracy", "top2", "f1", "perplexity"])
def test_labels_that_do_not_count(scored, name):
    scores, labels = scored
    left_out = labels.copy()
    left_out[::3] = -100
    found, kept = measured(name, scores, left_out, classes=7, ignored=-100), left_out >= 0
    assert found == pytest.approx(measured(name, scores[kept], labels[kept], classes=7), rel=1e-12)
    if name != "f1":
        assert np.isnan(measured(name, scores[::3], left_out[::3], classes=7, ignored=-100))


def test_numbers(sklearn):
    rng = np.random.default_rng(1)
    outputs, labels = rng.normal(size=(40, 1)), rng.normal(size=40)
    loss = "mean_squared_error"
    expected = sklearn.mean_absolute_error(labels, outputs[:, 0])
    assert measured("mae", outputs, labels, loss) == pytest.approx(expected)
    expected = sklearn.mean_squared_error(labels, outputs[:, 0]) ** 0.5
    assert measured("rmse", outputs, labels, loss) == pytest.approx(expected)
    right = ((outputs[:, 0] > 0) == (labels > 0.5)).mean()
    assert measured("accuracy", outputs, labels, "binary_cross_entropy") == right


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda y, t: abs(y - t).max(), 3.0),
        (lambda y, t: ((y - t).sum(), (t > 1).sum()), 2.5),
        (lambda y, t: (1.0, 0), np.nan),
    ],
)
def test_a_function_of_all_samples_gives_a_number_or_a_sum_and_a_count(function, wanted):
    found = AllSamples(function).value(np.array([1.0, 2, 2, 5]), np.array([1, 0, 2, 2]))
    assert found == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize("loss", ["cross_entropy", "mean_squared_error", "binary_cross_entropy"])
def test_names_go_with_losses_or_are_refused(loss):
    fitting = [name for name in NAMES if not refusal(name, loss)]
    assert set(usual(loss)) <= set(fitting)
    build(fitting, loss, 3, ALONE)
    assert refusal("acuracy", loss) and refusal("top0", loss)
