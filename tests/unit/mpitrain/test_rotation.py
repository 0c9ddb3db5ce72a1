"""Rotations by the Walsh-Hadamard transform, against its matrix."""

import numpy as np
import pytest

from mpitrain.compress.seeds import subset
from mpitrain.federated.rotation import padded, random_signs, rotate, unrotate


def hadamard(n):
    """Sylvester's matrix, orthonormal."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix / np.sqrt(n)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 128])
def test_it_is_signs_and_then_hadamards_matrix(n):
    signs = random_signs(n, 5)
    rotation = np.array([rotate(row, signs) for row in np.eye(n)]).T
    np.testing.assert_allclose(rotation, hadamard(n) * signs, atol=1e-15)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 17, 64, 65, 1000])
def test_there_and_back(n):
    x = np.random.default_rng(n).normal(size=n)
    kept = x.copy()
    signs = random_signs(padded(n), 3)
    z = rotate(x, signs)
    assert z.shape == (padded(n),) and z.dtype == np.float64
    assert z @ z == pytest.approx(x @ x, rel=1e-12)
    np.testing.assert_allclose(unrotate(z, n, signs), x, atol=1e-14)
    np.testing.assert_array_equal(x, kept)


def test_sums_are_rotated_back_and_are_exact_where_halves_are():
    ranks = np.random.default_rng(0).integers(-64, 64, (5, 900)) / 8
    signs = random_signs(1024, 7)
    total = sum(rotate(x, signs) for x in ranks)
    np.testing.assert_array_equal(unrotate(total, 900, signs), ranks.sum(0))


def test_signs_are_of_their_words_and_as_often_plus_as_minus():
    signs = random_signs(10_000, 1, "w")
    np.testing.assert_array_equal(signs, random_signs(10_000, 1, "w"))
    assert set(signs) == {-1.0, 1.0} and abs(signs.sum()) < 5 * 100
    assert (signs != random_signs(10_000, 2, "w")).any() and random_signs(0, 1).shape == (0,)


@pytest.mark.parametrize(("n", "count"), [(0, 0), (1, 1), (9, 3), (9, 9), (1000, 10)])
def test_subsets_rise_and_take_each_element_alike(n, count):
    chosen = subset(n, count, 1, "w")
    assert chosen.shape == (count,) and (np.diff(chosen) > 0).all() and (chosen < n).all()
    if n == 9 and count == 3:
        times = np.bincount(np.concatenate([subset(9, 3, s) for s in range(3000)]), minlength=9)
        assert abs(times - 1000).max() < 5 * np.sqrt(3000 * (1 / 3) * (2 / 3))
