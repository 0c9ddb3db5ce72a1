"""The mixture of experts on one rank: routing, drops, losses and gradients."""

from math import ceil

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.nn.context import Context, Terms
from tests.unit.mpitrain.test_layers import finite_differences

SHAPE = (3, 7, 6)


def mixture(experts=4, **rules):
    def expert():
        return nn.Chain({"up": nn.Linear(6, 8), "gelu": nn.GELU(), "out": nn.Linear(8, 6)})

    return nn.Experts(6, [expert() for _ in range(experts)], nn.Routing(**rules))


def drawn(layer, scale=0.5):
    """(parameters, x, dy); a router that tells positions apart."""
    rng = np.random.default_rng(7)
    parameters = layer.parameters(rng, np, np.float64)
    values = {k: v + scale * rng.normal(size=v.shape) for k, v in parameters.items()}
    return values, rng.normal(size=SHAPE), rng.normal(size=SHAPE)


def softmax(scores):
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def one_by_one(layer, parameters, x):
    """(y, sum of the samples' losses, rows dropped), position after position."""
    rule, experts = layer.routing, len(layer.layers) - 1
    room = ceil(rule.capacity * rule.top * x.shape[1] / experts) if rule.capacity else np.inf
    y, losses, dropped = np.zeros_like(x), 0.0, 0
    for sample, rows in enumerate(x):
        scores = rows @ parameters["router.weight"]
        p, taken, chosen = softmax(scores), np.zeros(experts), np.zeros(experts)
        for position, row in enumerate(rows):
            best = sorted(range(experts), key=lambda e: -p[position, e])[: rule.top]
            whole = sum(p[position, e] for e in best) if rule.top > 1 else 1.0
            for e in best:
                chosen[e] += 1
                if taken[e] >= room:
                    dropped += 1
                    continue
                taken[e] += 1
                own = nn.chain.own_parameters(parameters, str(e))
                made, _ = layer.layers[str(e)].forward(own, row[None])
                y[sample, position] += p[position, e] / whole * made[0]
        even = experts * (chosen / chosen.sum()) @ p.mean(axis=0)
        z = np.mean(np.log(np.exp(scores).sum(axis=-1)) ** 2)
        losses += rule.balance * even + rule.router_z * z
    return y, losses, dropped


RULES = [
    dict(top=1, capacity=0.0),
    dict(top=1, capacity=1.0),
    dict(top=2, capacity=0.6),
    dict(top=4, capacity=0.0),
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_positions_go_through_their_experts(rules):
    layer = mixture(balance=0.3, router_z=0.2, **rules)
    parameters, x, _ = drawn(layer)
    expected, losses, dropped = one_by_one(layer, parameters, x)
    terms = Terms(0.25)
    y, _ = layer.forward(parameters, x, Context(training=True, terms=terms))
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
    assert terms.total == pytest.approx(0.25 * losses, rel=1e-12)
    assert (dropped > 0) == (rules["capacity"] > 0)


def test_rounding_errors_make_no_room():
    layer = mixture(experts=1, top=1, capacity=0.07)  # times 100 is 7.000000000000001
    y, _ = layer.forward(drawn(layer)[0], np.ones((1, 100, 6)), Context())
    assert np.any(y != 0, axis=-1).sum() == 7


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_gradients_are_finite_differences_with_the_losses(rules):
    layer = mixture(balance=0.3, router_z=0.2, **rules)
    parameters, x, dy = drawn(layer)

    def loss():
        terms = Terms(0.25)
        y, _ = layer.forward(parameters, x, Context(training=True, terms=terms))
        return float((y * dy).sum()) + terms.total

    _, saved = layer.forward(parameters, x, Context(training=True, terms=Terms(0.25)))
    dx, kept = layer.backward(parameters, saved, dy)
    gradients = layer.gradients(parameters, kept)
    assert gradients.keys() == parameters.keys()
    for found, values in [(dx, x), *((gradients[name], v) for name, v in parameters.items())]:
        np.testing.assert_allclose(found, finite_differences(loss, values), rtol=1e-5, atol=1e-7)


def test_all_positions_may_go_to_one_expert():
    """Others get none, and gradients of 0."""
    layer = mixture(top=1, capacity=0.0)
    parameters, x, dy = drawn(layer)
    x[..., 0] = 1.0
    parameters["router.weight"][...] = 0.0
    parameters["router.weight"][0, 2] = 50.0
    y, saved = layer.forward(parameters, x)
    gate = softmax(np.array([0.0, 0.0, 50.0, 0.0]))[2]
    own = nn.chain.own_parameters(parameters, "2")
    np.testing.assert_allclose(y, gate * layer.layers["2"].forward(own, x)[0], rtol=1e-12)
    gradients = layer.gradients(parameters, layer.backward(parameters, saved, dy)[1])
    used = {name.partition(".")[0] for name, one in gradients.items() if one.any()}
    assert used - {"router"} == {"2"}
