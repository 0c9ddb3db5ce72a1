"""Adasum: means of what is parallel, sums of what is not, on any number of ranks."""

import numpy as np
import pytest

from mpitrain.parallel.adasum_sum import levels
from tests.adasum import adasum, pair


def rule(a, b):
    dot = a @ b
    return a * (1 - dot / (2 * a @ a)) + b * (1 - dot / (2 * b @ b))


@pytest.mark.parametrize("size", range(1, 9))
def test_equal_vectors_are_averaged_and_orthogonal_ones_added(size):
    a = np.random.default_rng(0).normal(size=20)
    np.testing.assert_allclose(adasum([a] * size), a, rtol=1e-12)
    np.testing.assert_array_equal(adasum(list(np.eye(size, 9))), np.eye(size, 9).sum(0))


def test_the_tree_is_fixed():
    assert levels(6) == [[(0, 4), (1, 5)], [(0, 1), (2, 3)], [(0, 2)]]
    for size in range(1, 40):
        gone = [gives for level in levels(size) for _, gives in level]
        assert sorted(gone) == list(range(1, size))


def test_of_five_it_is_the_rule_by_the_tree():
    a, b, c, d, e = np.random.default_rng(1).normal(size=(5, 30)) + 1
    expected = rule(rule(rule(a, e), b), rule(c, d))
    np.testing.assert_allclose(adasum([a, b, c, d, e]), expected, rtol=1e-12)


def test_zeros_add_nothing_and_no_size_overflows():
    a = np.array([1.0, -2, 0])
    np.testing.assert_array_equal(pair(a, np.zeros(3)), a)
    np.testing.assert_array_equal(pair(np.zeros(3), a), a)
    np.testing.assert_array_equal(pair(np.zeros(3), np.zeros(3)), np.zeros(3))
    for size in (1e-300, 1e300):
        np.testing.assert_allclose(pair(size * a, size * a), size * a, rtol=1e-15)
