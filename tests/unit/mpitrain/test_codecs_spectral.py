"""Codecs of singular vectors and of rotated numbers."""

import numpy as np
import pytest
from codec_cases import draw, once, through

from mpitrain.compress import parse
from mpitrain.compress.atomo import probabilities, systematic
from mpitrain.compress.codec import feedback_of
from mpitrain.compress.rotate import random_signs, rotate


def drawn(codec, x, draws):
    """Several codes of ``x``, decoded."""
    return np.array([once(codec, x, seed) for seed in range(draws)])


# ATOMO


@pytest.mark.parametrize("seed", range(20))
def test_they_do_so_with_the_least_variance(seed):
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
    dice = (np.arange(5000) + 0.5) / 5000
    chosen = [systematic(shares, die) for die in dice]
    assert {len(c) for c in chosen} == {3}
    np.testing.assert_allclose(np.bincount(np.concatenate(chosen), minlength=7) / 5000, shares)


@pytest.mark.parametrize("text", ["atomo:rank=3", "atomo:rank=2,columns=6"])
def test_the_mean_over_the_dice_is_the_matrix(text):
    codec, draws = parse(text), 800
    x = np.random.default_rng(0).normal(size=143)
    found = drawn(codec, x, draws)
    rows, columns, atoms = codec.shape(143)
    matrix = np.zeros(rows * columns)
    matrix[:143] = x
    values = np.linalg.svd(matrix.reshape(rows, columns), compute_uv=False)
    variance = np.sum(values**2 * (1 / probabilities(values, atoms) - 1))
    assert np.square(found - x).sum(1).mean() <= variance * 1.1
    sigma = found.std(0)
    assert (np.abs(found.mean(0) - x) <= 5 * sigma / np.sqrt(draws) + 1e-6).all()


def test_a_matrix_of_low_rank_is_sent_as_it_is():
    x = np.outer(np.arange(20.0), np.arange(1, 21)).reshape(-1)
    np.testing.assert_allclose(through(parse("atomo:rank=1"), x), x, rtol=1e-6, atol=1e-4)
    y = np.random.default_rng(0).normal(size=30)
    np.testing.assert_allclose(through(parse("atomo:rank=9"), y), y, rtol=1e-6)


# rotations


def test_rotated_and_masked_it_is_right_on_average():
    codec, draws = parse("rotate:block=64,keep=0.5+int8:rounding=stochastic,block=0"), 600
    assert codec.unbiased and feedback_of(codec) == "never"
    x = np.random.default_rng(0).normal(size=100)
    found = drawn(codec, x, draws)
    assert (np.abs(found.mean(0) - x) <= 5 * found.std(0) / np.sqrt(draws)).all()
    # Of 128 rotated elements half are sent, times two: 2 - 1 times the square, on 128 elements.
    assert np.square(found - x).sum(1).mean() == pytest.approx(x @ x * 100 / 128, rel=0.1)


def test_the_seed_of_a_rotation_travels_with_the_code():
    x, codec = np.random.default_rng(0).normal(size=64), parse("rotate:block=0+int8:block=1")
    code = np.empty(codec.nbytes(64), np.uint8)
    codec.encode(x, code, draw(3))
    seed = int(code[:8].view(np.uint64)[0])
    inner = np.empty(64)
    codec.code.decode(code[8:], inner)
    np.testing.assert_allclose(inner, rotate(x, random_signs(64, seed)), rtol=1e-6)
