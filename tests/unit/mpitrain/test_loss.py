"""Losses against SciPy and finite differences."""

import numpy as np
import pytest

from mpitrain.group import TensorGroup
from mpitrain.objective import CrossEntropy
from mpitrain.objective.elementwise import BinaryCrossEntropy, MeanSquaredError
from mpitrain.parallel.precision import LossScale


def softmax_cross_entropy(scores, labels, divisor, smoothing=0.0):
    return CrossEntropy(TensorGroup(), scores.shape[-1], smoothing)(scores, labels, divisor)


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(7, 4)), rng.integers(4, size=7)


def expect_slope(loss, outputs, gradient):
    from scipy.optimize import approx_fprime

    numeric = approx_fprime(outputs.ravel(), lambda flat: loss(flat.reshape(outputs.shape)), 1e-7)
    np.testing.assert_allclose(gradient.ravel(), numeric, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_against_scipy_and_finite_differences(batch, smoothing):
    """Smoothed labels are a mixture."""
    from scipy.special import log_softmax

    logits, labels = batch
    mixture = np.full((7, 4), smoothing / 4)
    mixture[np.arange(7), labels] += 1 - smoothing
    expected = -(mixture * log_softmax(logits, axis=1)).sum(axis=1).mean()
    found, gradient = softmax_cross_entropy(logits, labels, 7, smoothing)
    assert found == pytest.approx(expected, rel=1e-14)
    expect_slope(lambda x: softmax_cross_entropy(x, labels, 7, smoothing)[0], logits, gradient)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_labels_that_are_left_out(batch, smoothing):
    """Sum, gradient and count are those of the others, also if there are none."""
    logits, labels = batch
    labels[[1, 4, 5]] = -100
    loss, kept = CrossEntropy(TensorGroup(), 4, smoothing, ignore_index=-100), labels >= 0
    found, gradient, counted = loss(logits, labels, 7)
    value, of_kept = softmax_cross_entropy(logits[kept], labels[kept], 7, smoothing)
    assert (found, counted) == (value, 4)
    np.testing.assert_array_equal(gradient[kept], of_kept)
    assert not gradient[~kept].any()
    shaped = loss(logits[:6].reshape(2, 3, 4), labels[:6].reshape(2, 3), 7)
    assert (shaped[1].shape, shaped[2]) == ((2, 3, 4), 3)
    for some in (np.s_[:0], np.s_[4:6]):
        nothing = loss(logits[some], labels[some], 7)
        assert (nothing[0], nothing[2]) == (0, 0)
        np.testing.assert_array_equal(nothing[1], np.zeros_like(logits[some]))


def test_large_scores_do_not_overflow():
    logits = np.array([[1e4, 0.0], [0.0, 1e4]], dtype=np.float32)
    loss, gradient = softmax_cross_entropy(logits, np.array([0, 0]), 2)
    assert loss == pytest.approx(5e3)
    np.testing.assert_array_equal(gradient, [[0, 0], [-0.5, 0.5]])
    assert gradient.dtype == np.float32


@pytest.mark.parametrize("loss", [MeanSquaredError(), BinaryCrossEntropy()])
def test_elementwise_gradients_against_finite_differences(loss):
    rng = np.random.default_rng(3)
    outputs, labels = rng.normal(scale=3, size=(5, 3)), rng.random((5, 3))
    _, gradient = loss(outputs, labels, 15)
    expect_slope(lambda x: loss(x, labels, 15)[0], outputs, gradient)


def test_elementwise_values():
    outputs, labels = np.array([[1.0], [3.0]]), np.array([2.0, 1.0])
    assert MeanSquaredError()(outputs, labels, 2)[0] == 2.5
    value, gradient = BinaryCrossEntropy()(np.array([1e4, -1e4, 0.0]), np.array([1.0, 1, 0]), 1)
    assert value == pytest.approx(1e4 + np.log(2))
    np.testing.assert_allclose(gradient, [0, -1, 0.5])


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "kind", "message"),
    [
        (CrossEntropy(TensorGroup(), 3), (3,), (), "f4", "needs integers from 0"),
        (CrossEntropy(TensorGroup(), 3), (4,), (), "i8", r"scores of 3 classes.*: \(3,\)"),
        (CrossEntropy(TensorGroup(), 3), (3,), (5,), "i8", r"\(5, 3\)"),
        (MeanSquaredError(), (2,), (3,), "f4", "must be alike"),
        (MeanSquaredError(), (4, 1), (2, 2), "f4", "must be alike"),
        (MeanSquaredError(), (1,), (), "O", "must be numbers"),
    ],
)
def test_what_does_not_fit_is_refused(loss, outputs, labels, kind, message):
    with pytest.raises(ValueError, match=message):
        loss.expect(outputs, labels, np.dtype(kind))
    CrossEntropy(TensorGroup(), 3).expect((5, 3), (5,), np.dtype("u1"))
    MeanSquaredError().expect((1,), (), np.dtype("f4"))
    BinaryCrossEntropy().expect((2, 2), (2, 2), np.dtype("i8"))


def test_the_scale_is_doubled_after_so_many_good_steps():
    scale = LossScale(8.0, 3, enabled=True)
    found = []
    for _ in range(6):
        scale.went_well()
        found.append(scale.value)
    assert found == [8, 8, 16, 16, 16, 32]
    scale.overflowed()
    assert (scale.value, scale.good_steps) == (16, 0)
