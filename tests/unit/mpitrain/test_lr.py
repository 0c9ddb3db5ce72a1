"""Values of the learning rate, worked out by hand."""

import pytest

from mpitrain.config import Optim, Train
from mpitrain.lr import learning_rate

TRAIN = Train(epochs=10, batch_size=256)


def rates(epochs, **fields):
    optim = Optim(lr=0.1, reference_batch=64, **fields)
    return [learning_rate(optim, TRAIN, epoch) for epoch in epochs]


def test_linear_scaling():
    assert rates([0, 9.5]) == pytest.approx([0.4, 0.4])


def test_warm_up_climbs_from_the_reference_rate_to_the_scaled_one():
    expected = [0.1, 0.175, 0.25, 0.325, 0.4, 0.4]
    assert rates([0, 1, 2, 3, 4, 9], warmup_epochs=4) == pytest.approx(expected)


def test_warm_up_never_exceeds_the_scaled_rate_of_a_small_batch():
    optim = Optim(lr=0.1, reference_batch=64, warmup_epochs=4)
    small = Train(epochs=10, batch_size=32)
    assert [learning_rate(optim, small, e) for e in (0, 2, 5)] == pytest.approx([0.05] * 3)


def test_cosine_falls_from_the_end_of_warm_up_to_zero():
    expected = [0.25, 0.4, 0.2, 0.0]
    found = rates([1, 2, 6, 10], warmup_epochs=2, schedule="cosine")
    assert found == pytest.approx(expected, abs=1e-15)


def test_steps_fall_at_their_milestones():
    found = rates([0, 2.99, 3, 5.5, 6, 9], schedule="step", milestones=(3, 6), decay=0.5)
    assert found == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1, 0.1])
