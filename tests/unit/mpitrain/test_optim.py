"""Optimisers against their recurrences, written out one number at a time."""

from math import sqrt

import numpy as np
import pytest

from mpitrain.optim.optimizers import LAMB, LARS, SGD, Adam


def run(optimizer, steps=4, ratio=1.0):
    """Parameters after each step; and the gradients and rates that led there."""
    rng = np.random.default_rng(0)
    parameters = rng.normal(size=5)
    state = {slot: np.zeros(5) for slot in optimizer.slots}
    history = [parameters.copy()]
    inputs = []
    for step in range(1, steps + 1):
        gradients, lr = rng.normal(size=5), 0.1 / step
        kept = gradients.copy()
        direction = optimizer.prepare(parameters, gradients, state, step)
        optimizer.apply(parameters, direction, state, lr * ratio)
        np.testing.assert_array_equal(gradients, kept)
        inputs.append((kept, lr))
        history.append(parameters.copy())
    return history, inputs


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum, weight_decay, nesterov):
    history, inputs = run(SGD(momentum, weight_decay, nesterov))
    expected, speed = history[0].tolist(), [0.0] * 5
    for (gradients, lr), found in zip(inputs, history[1:], strict=True):
        for i in range(5):
            g = float(gradients[i]) + weight_decay * expected[i]
            speed[i] = momentum * speed[i] + g
            expected[i] -= lr * (g + momentum * speed[i] if nesterov else speed[i])
        np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam(weight_decay, decoupled):
    optimizer = Adam(0.8, 0.9, 1e-6, weight_decay, decoupled)
    history, inputs = run(optimizer)
    expected, mean, square = history[0].tolist(), [0.0] * 5, [0.0] * 5
    for step, ((gradients, lr), found) in enumerate(zip(inputs, history[1:], strict=True), 1):
        for i in range(5):
            g = float(gradients[i]) + (0 if decoupled else weight_decay * expected[i])
            mean[i] = 0.8 * mean[i] + 0.2 * g
            square[i] = 0.9 * square[i] + 0.1 * g * g
            root = sqrt(square[i] / (1 - 0.9**step)) + 1e-6
            change = mean[i] / (1 - 0.8**step) / root
            expected[i] -= lr * (change + (weight_decay * expected[i] if decoupled else 0))
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_lars_moves_by_the_rate_of_the_tensor():
    optimizer = LARS(momentum=0.5, weight_decay=0.01, trust=0.02)
    assert optimizer.ratio(3.0, 4.0, 9.0) == pytest.approx(0.02 * 3 / (4 + 0.03))
    assert optimizer.ratio(0.0, 4.0, 9.0) == optimizer.ratio(3.0, 0.0, 9.0) == 1.0
    history, inputs = run(optimizer, ratio=0.3)
    expected, speed = history[0].tolist(), [0.0] * 5
    for (gradients, lr), found in zip(inputs, history[1:], strict=True):
        for i in range(5):
            g = float(gradients[i]) + 0.01 * expected[i]
            speed[i] = 0.5 * speed[i] + 0.3 * lr * g
            expected[i] -= speed[i]
        np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_lamb_is_adamw_with_a_rate_for_each_tensor():
    optimizer = LAMB(0.8, 0.9, 1e-6, 0.1)
    assert optimizer.ratio(3.0, 4.0, 6.0) == 0.5
    assert optimizer.ratio(0.0, 4.0, 6.0) == optimizer.ratio(3.0, 4.0, 0.0) == 1.0
    ours, _ = run(optimizer)
    adamw, _ = run(Adam(0.8, 0.9, 1e-6, 0.1, decoupled=True))
    np.testing.assert_array_equal(ours, adamw)


@pytest.mark.parametrize("optimizer", [SGD(0.9, 0.1, True), Adam(decoupled=True), LARS(), LAMB()])
def test_types_stay(optimizer):
    gradients, parameters = np.ones(3, np.float32), np.full(3, 2, np.float32)
    state = {slot: np.zeros(3, np.float32) for slot in optimizer.slots}
    direction = optimizer.prepare(parameters, gradients, state, 1)
    optimizer.apply(parameters, direction, state, 0.5)
    assert {a.dtype for a in (parameters, direction, *state.values())} == {np.dtype(np.float32)}


def test_momentum_reaches_the_minimum_of_a_quadratic():
    optimizer = SGD(momentum=0.9)
    parameters, state = np.array([3.0, -2.0]), {"velocity": np.zeros(2)}
    for step in range(1, 401):
        direction = optimizer.prepare(parameters, parameters * [1.0, 10.0], state, step)
        optimizer.apply(parameters, direction, state, 0.05)
    np.testing.assert_allclose(parameters, 0, atol=1e-6)
