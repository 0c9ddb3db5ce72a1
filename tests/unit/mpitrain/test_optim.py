"""Optimisers against their recurrences, written out one number at a time."""

from functools import partial
from itertools import product
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


def sgd(kept, p, g, lr, step, momentum, weight_decay, nesterov):
    g += weight_decay * p
    kept["speed"] = momentum * kept.get("speed", 0.0) + g
    return p - lr * (g + momentum * kept["speed"] if nesterov else kept["speed"])


def adam(kept, p, g, lr, step, weight_decay, decoupled):
    g += 0 if decoupled else weight_decay * p
    kept["mean"] = 0.8 * kept.get("mean", 0.0) + 0.2 * g
    kept["square"] = 0.9 * kept.get("square", 0.0) + 0.1 * g * g
    root = sqrt(kept["square"] / (1 - 0.9**step)) + 1e-6
    change = kept["mean"] / (1 - 0.8**step) / root
    return p - lr * (change + (weight_decay * p if decoupled else 0))


def lars(kept, p, g, lr, step):
    kept["speed"] = 0.5 * kept.get("speed", 0.0) + 0.3 * lr * (g + 0.01 * p)
    return p - kept["speed"]


CASES = [
    *((SGD(*how), partial(sgd, momentum=how[0], weight_decay=how[1], nesterov=how[2]), 1.0)
      for how in product((0.0, 0.9), (0.0, 0.01), (False, True))),
    *((Adam(0.8, 0.9, 1e-6, *how), partial(adam, weight_decay=how[0], decoupled=how[1]), 1.0)
      for how in product((0.0, 0.1), (False, True))),
    (LAMB(0.8, 0.9, 1e-6, 0.1), partial(adam, weight_decay=0.1, decoupled=True), 1.0),
    (LARS(momentum=0.5, weight_decay=0.01, trust=0.02), lars, 0.3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "recurrence", "ratio"), CASES, ids=[str(optimizer) for optimizer, *_ in CASES]
)
def test_steps_are_those_of_the_recurrence(optimizer, recurrence, ratio):
    history, inputs = run(optimizer, ratio=ratio)
    expected, kept = history[0].tolist(), [{} for _ in range(5)]
    for step, ((gradients, lr), found) in enumerate(zip(inputs, history[1:], strict=True), 1):
        for i, g in enumerate(gradients.tolist()):
            expected[i] = recurrence(kept[i], expected[i], g, lr, step)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_ratios_of_a_tensor():
    lars, lamb = LARS(weight_decay=0.01, trust=0.02), LAMB()
    assert lars.ratio(3.0, 4.0, 9.0) == pytest.approx(0.02 * 3 / (4 + 0.03))
    assert lars.ratio(0.0, 4.0, 9.0) == lars.ratio(3.0, 0.0, 9.0) == 1.0
    assert lamb.ratio(3.0, 4.0, 6.0) == 0.5
    assert lamb.ratio(0.0, 4.0, 6.0) == lamb.ratio(3.0, 4.0, 0.0) == 1.0


def test_without_memory_a_small_gradient_is_not_lost_behind_a_large_one():
    optimizer, parameters = Adam(0.0, 0.0, 1e-8), np.zeros(1, np.float32)
    state = {slot: np.zeros(1, np.float32) for slot in optimizer.slots}
    for step, value in enumerate((1.0, 1e-4, 1e-7), 1):
        direction = optimizer.prepare(parameters, np.full(1, value, np.float32), state, step)
        assert direction[0] == pytest.approx(1 / (1 + 1e-8 / value))


@pytest.mark.parametrize("optimizer", [SGD(0.9, 0.1, True), Adam(decoupled=True), LARS(), LAMB()])
def test_types_stay(optimizer):
    gradients, parameters = np.ones(3, np.float32), np.full(3, 2, np.float32)
    state = {slot: np.zeros(3, np.float32) for slot in optimizer.slots}
    direction = optimizer.prepare(parameters, gradients, state, 1)
    optimizer.apply(parameters, direction, state, 0.5)
    assert {a.dtype for a in (parameters, direction, *state.values())} == {np.dtype(np.float32)}
