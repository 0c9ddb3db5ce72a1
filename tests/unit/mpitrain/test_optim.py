"""SGD against its recurrence, written out one number at a time."""

import numpy as np
import pytest

from mpitrain.optim import SGD


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_against_the_recurrence(momentum, weight_decay, nesterov):
    optimizer = SGD(momentum, weight_decay, nesterov)
    rng = np.random.default_rng(0)
    parameters = rng.normal(size=5)
    velocity = optimizer.init(parameters)
    expected, speed = parameters.tolist(), [0.0] * 5
    for step in range(4):
        gradients, lr = rng.normal(size=5), 0.1 / (step + 1)
        change, velocity = optimizer.update(gradients, velocity, parameters, lr)
        parameters = parameters + change
        for i in range(5):
            g = float(gradients[i]) + weight_decay * expected[i]
            speed[i] = momentum * speed[i] + g
            expected[i] -= lr * (g + momentum * speed[i] if nesterov else speed[i])
        np.testing.assert_allclose(parameters, expected, rtol=1e-14)


def test_arguments_are_left_alone_and_types_stay():
    gradients, parameters = np.ones(3, np.float32), np.full(3, 2, np.float32)
    optimizer = SGD(0.9, 0.1, nesterov=True)
    velocity = optimizer.init(parameters)
    change, after = optimizer.update(gradients, velocity, parameters, 0.5)
    assert (change.dtype, after.dtype) == (np.float32, np.float32)
    for array, value in ((gradients, 1), (parameters, 2), (velocity, 0)):
        np.testing.assert_array_equal(array, value)


def test_momentum_reaches_the_minimum_of_a_quadratic():
    optimizer = SGD(momentum=0.9)
    parameters = np.array([3.0, -2.0])
    velocity = optimizer.init(parameters)
    for _ in range(400):
        change, velocity = optimizer.update(parameters * [1.0, 10.0], velocity, parameters, 0.05)
        parameters = parameters + change
    np.testing.assert_allclose(parameters, 0, atol=1e-6)
