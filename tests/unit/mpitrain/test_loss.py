"""Softmax cross-entropy against SciPy and finite differences."""

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from scipy.special import log_softmax

from mpitrain.group import TensorGroup
from mpitrain.parallel.tensor import VocabularyLoss


def softmax_cross_entropy(scores, labels, divisor):
    return VocabularyLoss(TensorGroup(), scores.shape[-1])(scores, labels, divisor)


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(7, 4)), rng.integers(4, size=7)


def test_value_against_scipy(batch):
    logits, labels = batch
    expected = -log_softmax(logits, axis=1)[np.arange(7), labels].mean()
    assert softmax_cross_entropy(logits, labels, 7)[0] == pytest.approx(expected, rel=1e-14)


def test_gradient_against_finite_differences(batch):
    logits, labels = batch

    def loss(flat):
        return softmax_cross_entropy(flat.reshape(7, 4), labels, 7)[0]

    _, gradient = softmax_cross_entropy(logits, labels, 7)
    numeric = approx_fprime(logits.ravel(), loss, 1e-7)
    np.testing.assert_allclose(gradient.ravel(), numeric, atol=1e-6)


def test_parts_of_a_batch_add_up_to_the_whole(batch):
    logits, labels = batch
    whole, gradient = softmax_cross_entropy(logits, labels, 7)
    parts = [softmax_cross_entropy(logits[s], labels[s], 7) for s in np.s_[:0, :2, 2:7]]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-14)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), gradient, rtol=1e-14)


def test_large_scores_do_not_overflow():
    logits = np.array([[1e4, 0.0], [0.0, 1e4]], dtype=np.float32)
    loss, gradient = softmax_cross_entropy(logits, np.array([0, 0]), 2)
    assert loss == pytest.approx(5e3)
    np.testing.assert_array_equal(gradient, [[0, 0], [-0.5, 0.5]])
    assert gradient.dtype == np.float32


def test_labels_of_every_position(batch):
    logits, labels = batch
    whole, gradient = softmax_cross_entropy(logits[:6], labels[:6], 6)
    shaped = softmax_cross_entropy(logits[:6].reshape(2, 3, 4), labels[:6].reshape(2, 3), 6)
    assert shaped[0] == whole
    np.testing.assert_array_equal(shaped[1], gradient.reshape(2, 3, 4))


def test_right_answers_and_ties():
    loss = VocabularyLoss(TensorGroup(), 3)
    scores = np.array([[1.0, 2.0, 0.0], [5.0, 5.0, 0.0], [0.0, 1.0, 3.0]])
    assert loss.right(scores, np.array([1, 0, 0])) == 2
    assert loss.right(scores[:0], np.array([], int)) == 0


def test_sixteen_bit_scores_are_computed_with_in_thirty_two():
    scores = np.full((1, 5000), 8, np.float16)
    loss, gradient = softmax_cross_entropy(scores, np.array([3]), 1)
    assert loss == pytest.approx(np.log(5000), rel=1e-6)
    assert gradient.dtype == np.float16
