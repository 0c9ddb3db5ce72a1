"""Adasum: the tree of ranks, and its rule, by which tests of ranks compare."""

import numpy as np

from mpitrain.parallel.adasum_sum import levels
from tests.adasum import adasum


def rule(a, b):
    dot = a @ b
    return a * (1 - dot / (2 * a @ a)) + b * (1 - dot / (2 * b @ b))


def test_the_tree_is_fixed():
    assert levels(6) == [[(0, 4), (1, 5)], [(0, 1), (2, 3)], [(0, 2)]]
    for size in range(1, 40):
        gone = [gives for level in levels(size) for _, gives in level]
        assert sorted(gone) == list(range(1, size))


def test_of_five_it_is_the_rule_by_the_tree():
    a, b, c, d, e = np.random.default_rng(1).normal(size=(5, 30)) + 1
    expected = rule(rule(rule(a, e), b), rule(c, d))
    np.testing.assert_allclose(adasum([a, b, c, d, e]), expected, rtol=1e-12)
