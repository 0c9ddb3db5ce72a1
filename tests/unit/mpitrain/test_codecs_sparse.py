"""Codes that send some elements: which, and what becomes of the others."""

import numpy as np
import pytest
from codec_cases import sent_by, vectors

from mpitrain.compress import parse
from mpitrain.compress.codec import Remembering, feedback_of
from mpitrain.compress.topk import largest


@pytest.mark.parametrize("n", [1, 2, 5, 100, 5000, 100_000])
def test_the_largest_are_those_of_a_sort_and_of_equal_ones_the_first(n):
    rng = np.random.default_rng(n)
    drawn = [rng.normal(size=n), np.ones(n), rng.integers(-3, 3, n) / 1.0, *vectors(n).values()]
    for x in drawn if n < 5000 else drawn[:3]:
        order = np.lexsort((np.arange(n), -np.abs(x)))
        for k in {0, 1, n // 100, n // 2, n - 1, n}:
            found = largest(x, k)
            assert found.dtype == np.uint32
            np.testing.assert_array_equal(found, np.sort(order[:k]))


def test_a_sample_that_misleads_changes_nothing():
    x = np.zeros(100_000)
    x[::128] = 1 + np.arange(len(x[::128]))  # the sample sees large ones alone
    np.testing.assert_array_equal(largest(x, 2000), np.sort(np.argsort(-x, kind="stable")[:2000]))
    y = np.arange(100_000.0)
    y[::128] = 0  # and here small ones
    np.testing.assert_array_equal(largest(y, 100), np.sort(np.argsort(-y, kind="stable")[:100]))


# Deep Gradient Compression


def by_hand(gradients, keep, m, nesterov, masking, limit, dense):
    """Lin et al. 2018 one element at a time; returns what is sent in each step."""
    n = len(gradients[0])
    u, v, found = [0.0] * n, [0.0] * n, []
    for g in gradients:
        length = np.sqrt(sum(x * x for x in g))
        factor = min(1, limit / length) if limit and length else 1
        g = [x * factor for x in g]
        send = [0.0] * n
        for i in range(n):
            if nesterov:
                u[i] = m * (u[i] + g[i])
                velocity = u[i] + g[i]
            else:
                u[i] = m * u[i] + g[i]
                velocity = u[i]
            if i in dense:
                send[i] = velocity
            else:
                v[i] += velocity
        sparse = [i for i in range(n) if i not in dense]
        for i in sorted(sparse, key=lambda i: (-abs(v[i]), i))[: max(1, round(keep * len(sparse)))]:
            send[i], v[i] = v[i], 0.0
            if masking and send[i]:
                u[i] = 0.0
        found.append(send)
    return np.array(found), np.array(u), np.array(v)


def run(code, gradients, dense=(), ranks=1):
    """Sent part of each gradient, and u and v after all of them."""
    is_dense = np.zeros(len(gradients[0]), bool)
    for part in dense:
        is_dense[part] = True
    memory = code.memory(np.zeros(int((~is_dense).sum())))
    rest = code.of_sum(np.zeros(int(is_dense.sum())))
    found = []
    for step, g in enumerate(gradients):
        x = g * code.share(float(g @ g), ranks)
        sent, own = x[is_dense], x[~is_dense]
        memory.add_to(own)
        rest.add_to(sent)
        found.append(np.empty(len(x)))
        found[-1][is_dense], found[-1][~is_dense] = sent, sent_by(code, own, step)
        memory.keep(own, found[-1][~is_dense])
        memory.commit()
        rest.commit()
    u, v = np.zeros(len(is_dense)), np.zeros(len(is_dense))
    u[is_dense], u[~is_dense] = rest.arrays["u"], memory.arrays["u"]
    v[~is_dense] = memory.arrays["v"]
    return np.array(found), u, v


@pytest.mark.parametrize("dense", [(), (slice(3, 6), slice(20, 21))])
@pytest.mark.parametrize(
    "options", ["", ",nesterov=true", ",masking=false", ",clip=3", ",nesterov=true,masking=false"]
)
@pytest.mark.parametrize("keep", [0.15, 1.0])
def test_dgc_is_that_of_the_paper(keep, options, dense):
    code = parse(f"dgc:keep={keep},momentum=0.875{options}")
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=30) for _ in range(25)]
    places = {i for part in dense for i in range(30)[part]}
    limit = code.clip / np.sqrt(4)
    expected, u, v = by_hand(gradients, keep, 0.875, code.nesterov, code.masking, limit, places)
    found, own_u, own_v = run(code, gradients, dense, ranks=4)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(own_u, u, atol=1e-12)
    np.testing.assert_allclose(own_v, v, atol=1e-12)


def test_a_skipped_step_of_dgc_leaves_everything_as_it_was():
    code, rng = parse("dgc:keep=0.2"), np.random.default_rng(0)
    assert isinstance(code, Remembering) and feedback_of(code) == "on"
    memory = code.memory(np.zeros(20))
    for step in range(4):
        before = {name: array.copy() for name, array in memory.arrays.items()}
        x = rng.normal(size=20)
        if step == 2:
            x[3] = np.nan
        memory.add_to(x)
        memory.keep(x, sent_by(code, np.nan_to_num(x)))
        if step == 2:
            memory.rollback()
        memory.commit()
        assert any((memory.arrays[name] != before[name]).any() for name in before) == (step != 2)
        assert all(np.isfinite(array).all() for array in memory.arrays.values())


@pytest.mark.parametrize("name", ["dgc", "topk"])
def test_the_warm_up_sends_more_in_four_quarters(name):
    code = parse(f"{name}:keep=0.001,warmup=400")
    shares = [code.keep_at(step) for step in (0, 99, 100, 200, 300, 399, 400, 10**6)]
    wanted = [0.25, 0.25, 0.063, 0.0158, 0.00398, 0.00398, 0.001, 0.001]
    np.testing.assert_allclose(shares, wanted, rtol=0.01)
    x = np.random.default_rng(0).normal(size=10_000)
    assert [len(code.select(x, step)) for step in (0, 400)] == [2512, 10]
    assert parse(f"{name}:warmup=3").keep_at(0) == parse(name).keep ** 0.2
