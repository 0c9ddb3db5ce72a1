"""ATOMO, the codec of singular vectors."""

import numpy as np
import pytest
from codec_cases import once, through

from mpitrain.compress import parse
from mpitrain.compress.atomo import probabilities, systematic


@pytest.mark.parametrize("seed", range(20))
def test_probabilities_have_the_least_variance(seed):
    rng = np.random.default_rng(seed)
    values = np.sort(rng.exponential(size=8) ** 3)[::-1]
    shares = probabilities(values, 3)
    assert shares.sum() == pytest.approx(3) and ((shares > 0) & (shares <= 1)).all()
    least = np.sum(values**2 / shares)
    for _ in range(100):  # move probability from one atom to another
        i, j = rng.choice(8, 2, replace=False)
        other = shares.copy()
        step = 1e-3 * min(other[i], 1 - other[j])
        other[[i, j]] += [-step, step]
        assert np.sum(values**2 / other) >= least * (1 - 1e-12)


def test_always_as_many_are_drawn_and_each_with_its_probability():
    shares = np.array([1, 0.8, 0.5, 0.4, 0.2, 0.1, 0])
    chosen = [systematic(shares, die) for die in (np.arange(5000) + 0.5) / 5000]
    assert {len(c) for c in chosen} == {3}
    np.testing.assert_allclose(np.bincount(np.concatenate(chosen), minlength=7) / 5000, shares)


@pytest.mark.parametrize("text", ["atomo:rank=3", "atomo:rank=2,columns=6"])
def test_the_mean_over_the_dice_is_the_matrix(text):
    codec, draws = parse(text), 800
    x = np.random.default_rng(0).normal(size=143)
    found = np.array([once(codec, x, seed) for seed in range(draws)])
    rows, columns, atoms = codec.shape(143)
    matrix = np.zeros(rows * columns)
    matrix[:143] = x
    values = np.linalg.svd(matrix.reshape(rows, columns), compute_uv=False)
    variance = np.sum(values**2 * (1 / probabilities(values, atoms) - 1))
    assert np.square(found - x).sum(1).mean() <= variance * 1.1
    assert (np.abs(found.mean(0) - x) <= 5 * found.std(0) / np.sqrt(draws) + 1e-6).all()


def test_a_matrix_of_low_rank_is_sent_as_it_is():
    x = np.outer(np.arange(20.0), np.arange(1, 21)).reshape(-1)
    np.testing.assert_allclose(through(parse("atomo:rank=1"), x), x, rtol=1e-6, atol=1e-4)
    y = np.random.default_rng(0).normal(size=30)
    np.testing.assert_allclose(through(parse("atomo:rank=9"), y), y, rtol=1e-6)
