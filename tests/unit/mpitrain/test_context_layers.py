"""Dropout and batch norm, which see where they are."""

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.nn.context import Context


def context(samples, training=True, seed=3, step=5, path=("drop",), **more):
    return Context(training, seed, step, np.asarray(samples), path=path, **more)


def test_a_mask_follows_from_seed_step_layer_and_sample_alone():
    drop, x = nn.Dropout(0.4), np.ones((6, 50))
    whole, _ = drop.forward({}, x, context(range(10, 16)))
    for order in ([12], [15, 10], [11, 12, 13]):
        part, _ = drop.forward({}, x[: len(order)], context(order))
        assert np.array_equal(part, whole[[i - 10 for i in order]])
    for other in ({"seed": 4}, {"step": 6}, {"path": ("drop2",)}):
        assert not np.array_equal(drop.forward({}, x, context(range(10, 16), **other))[0], whole)
    assert len(np.unique(whole, axis=0)) == 6


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_shares_and_means_of_dropout(p):
    def dropped(**changed):
        y, _ = nn.Dropout(p).forward({}, np.ones((400, 300)), context(range(400), **changed))
        assert set(np.unique(y)) <= {0.0, 1 / (1 - p)}
        return (y == 0).ravel()

    own = dropped()
    assert abs(own.mean() - p) <= 5 * (p * (1 - p) / own.size) ** 0.5
    # Neither samples nor places go together, nor seeds, steps and layers.
    pairs = [(own[:-lag], own[lag:]) for lag in (1, 2, 7, 300, 301)]
    pairs += [(own, dropped(**other)) for other in ({"seed": 4}, {"step": 6}, {"path": ("b",)})]
    for a, b in pairs:
        assert p == 0 or abs(np.mean((a - p) * (b - p))) < 5 * p * (1 - p) / own.size**0.5


def test_dropout_rests_in_tests_and_goes_back_as_it_came():
    drop, x = nn.Dropout(0.5), np.ones((2, 8), np.float32)
    y, saved = drop.forward({}, x, context([0, 1], training=False))
    assert y is x and drop.backward({}, saved, x)[0] is x
    y, saved = drop.forward({}, x, context([0, 1]))
    assert y.dtype == np.float32
    assert np.array_equal(drop.backward({}, saved, x)[0], y)
    y, saved = nn.Dropout(1).forward({}, x, context([0, 1]))
    assert not y.any() and not nn.Dropout(1).backward({}, saved, x)[0].any()
    with pytest.raises(ValueError, match=r"p = 1"):
        nn.Dropout(1.1)


def batch_norm(**more):
    layer = nn.BatchNorm(3, **more)
    rng = np.random.default_rng(0)
    parameters = {"weight": rng.normal(size=3), "bias": rng.normal(size=3)}
    return layer, parameters, rng.normal(5, 3, (4, 2, 3)), layer.state(np.float64)


def test_batch_norm_against_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
    layer, parameters, x, state = batch_norm(momentum=0.3, epsilon=0.01)
    theirs = torch.nn.BatchNorm1d(3, eps=0.01, momentum=0.3).double()
    for name, value in parameters.items():
        getattr(theirs, name).data.copy_(torch.from_numpy(value))

    def there(values):  # torch has the channels in the middle
        return torch.from_numpy(values.transpose(0, 2, 1).copy())

    for turn in range(3):
        given = there(x + turn).requires_grad_()
        expected = theirs(given)
        dy = np.cos(np.arange(x.size)).reshape(x.shape)
        theirs.zero_grad()
        expected.backward(there(dy))
        y, saved = layer.forward(parameters, x + turn, context(range(4), state=state))
        dx, kept = layer.backward(parameters, saved, dy)
        np.testing.assert_allclose(there(y), expected.detach(), rtol=1e-12)
        np.testing.assert_allclose(there(dx), given.grad, rtol=1e-9, atol=1e-14)
        for name, gradient in layer.gradients(parameters, kept).items():
            np.testing.assert_allclose(gradient, getattr(theirs, name).grad.numpy(), rtol=1e-12)
    for name in state:
        np.testing.assert_allclose(state[name], getattr(theirs, name).numpy(), rtol=1e-12)
    y, _ = layer.forward(parameters, x, context(range(4), training=False, state=state))
    np.testing.assert_allclose(there(y), theirs.eval()(there(x)).detach(), rtol=1e-12)


def test_batch_norm_of_a_single_value_is_refused_in_training():
    layer, parameters, x, state = batch_norm()
    one = x[:1, :1]
    layer.forward(parameters, one, context([0], training=False, state=state))
    with pytest.raises(ValueError, match="has a single value a channel"):
        layer.forward(parameters, one, context([0], state=state))
    assert np.array_equal(state["running_var"], np.ones(3))
