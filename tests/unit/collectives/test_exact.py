"""Exact sums, beside Python's own and beside exact fractions."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from collectives.execution.exact import exact_sum, extreme

#: In the place of a type's largest number.
MOST = 1.5e300
finite = st.floats(allow_nan=False, allow_infinity=False)


def exact(columns, dtype=np.float64):
    """For each column of numbers the sum."""
    terms = [np.array(row, dtype) for row in zip(*columns, strict=True)]
    out = np.empty(len(columns), dtype)
    exact_sum(terms, out)
    return out


def nearest(column, dtype):
    """The sum rounded once, by fractions: the nearest of the three numbers around a guess."""
    total = sum(map(Fraction, np.asarray(column, np.float64).tolist()), Fraction())
    guess = np.array(float(total), np.float64).astype(dtype)
    around = [guess, *(np.nextafter(guess, np.array(w * np.inf, dtype)) for w in (1, -1))]
    whole = f"i{guess.itemsize}"

    def distance(value):
        return abs(Fraction(float(value)) - total), int(value.view(whole)) & 1

    return min((v for v in around if np.isfinite(v)), key=distance)


@settings(max_examples=400, deadline=None)
@given(st.lists(finite, min_size=1, max_size=9))
@example([1.0, 2.0**-53, 2.0**-200])
@example([1.0, 2.0**-53, -(2.0**-200)])
@example([1.0, -(2.0**-54), -(2.0**-200)])
@example([1.0 + 2.0**-52, 2.0**-53, -(2.0**-1074)])
@example([5e-324] * 7)
@example([2.0**999, 1.0, -(2.0**999), 2.0**-1074])
@example([1.7e308, 1.7e308, -1.7e308])
@example([2.0**1000, 2.0**-1074, -(2.0**1000)])
def test_float64_is_rounded_as_fsum_does(terms):
    try:
        wanted = math.fsum(terms)
    except OverflowError:
        total = sum(map(Fraction, terms))
        try:
            wanted = float(total)
        except OverflowError:
            wanted = math.inf if total > 0 else -math.inf
    assert exact([terms])[0] == wanted


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9))
@example([1.0, 2.0**-24, 2.0**-100])
@example([1.0, 2.0**-24, -(2.0**-100)])
@example([1.0, 2.0**-24, 2.0**-78, 2.0**-126])
@example([2.0**-149, 2.0**-149, 1.0, -1.0])
def test_float32_is_rounded_once(terms):
    assert exact([terms], np.float32)[0] == nearest(terms, np.float32)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1000, 1000, width=16), min_size=1, max_size=9))
def test_float16_is_rounded_once(terms):
    assert exact([terms], np.float16)[0] == nearest(terms, np.float16)


def test_bfloat16_is_rounded_once():
    kind = pytest.importorskip("ml_dtypes").bfloat16
    # 1 + half a last place of bfloat16 + a little that float32 would lose.
    assert exact([[1.0, 2.0**-8, 2.0**-40]], kind)[0] == np.array(1 + 2.0**-7, kind)
    assert exact([[1.0, 2.0**-8, -(2.0**-40)]], kind)[0] == 1
    assert exact([[1.0, 2.0**-8]], kind)[0] == 1
    assert exact([[3e38, 3e38]], kind)[0] == np.inf


def test_any_order_has_the_same_bits():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((5, 3000)) * 10.0 ** rng.integers(-30, 30, (5, 3000))
    out = np.empty((120, 3000))
    for order, row in zip(permutations(range(5)), out, strict=True):
        exact_sum([rows[i] for i in order], row)
    assert (out == out[0]).all()
    assert (out[0] == [math.fsum(column) for column in rows.T]).all()
    assert (rows.sum(axis=0) != out[0]).any()  # a plain sum would not do


def test_blocks_are_cut_where_they_may_be():
    rng = np.random.default_rng(2)
    for size in (0, 1, 1023, 1024, 40_000):
        terms = rng.standard_normal((3, size)).astype(np.float32)
        out = np.empty(size, np.float32)
        exact_sum(list(terms), out)
        np.testing.assert_array_equal(out, terms.astype(np.float64).sum(axis=0).astype(np.float32))


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, MOST, MOST], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([MOST, MOST], math.inf),
        ([-MOST, -MOST], -math.inf),
        ([0.0, -0.0], 0.0),
        ([-0.0, -0.0], -0.0),
        ([1.0, -1.0], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_is_not_finite_and_zeros(terms, wanted, dtype):
    with np.errstate(all="ignore"):
        terms = [np.copysign(np.finfo(dtype).max, t) if abs(t) == MOST else t for t in terms]
        columns = [np.array(terms).astype(dtype), np.ones(len(terms), dtype)]
    for at, order in ((0, columns), (1, columns[::-1])):
        found = exact(order, dtype)
        np.testing.assert_equal(found[at], dtype(wanted))
        assert math.copysign(1, found[at]) == math.copysign(1, wanted) or math.isnan(wanted)
        assert found[1 - at] == len(terms)


def test_complex_numbers_are_two_sums():
    terms = [np.array([1 + 1e-30j]), np.array([1e-30 - 1j]), np.array([-1 + 1j])]
    out = np.empty(1, complex)
    exact_sum(terms, out)
    assert out[0] == 1e-30 + 1e-30j


def test_the_result_may_be_one_of_the_terms_and_the_others_stay():
    terms = [np.array([1.0, 2]), np.array([3.0, 4])]
    exact_sum(terms, terms[0])
    np.testing.assert_array_equal(terms, [[4, 6], [3, 4]])


@pytest.mark.parametrize("kind", ["f8", "f4", "f2", "c16", "c8"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_byte_order_changes_nothing(kind, ranks):
    rng = np.random.default_rng(3)
    terms = [(rng.standard_normal(2000) * 10.0 ** rng.uniform(-4, 1, 2000)).astype(kind)] * ranks
    wanted, found = np.empty(2000, f"<{kind}"), np.empty(2000, f">{kind}")
    exact_sum(terms, wanted)
    exact_sum([term.astype(found.dtype) for term in terms], found)
    assert found.astype(wanted.dtype).tobytes() == wanted.tobytes()


def test_huge_numbers_among_others():
    column = [2.0**1010, -(2.0**1010), 3.0, 2.0**1023, -(2.0**1023), 1e-300]
    other = [2.0**1010, 2.0**960, 2.0**900, 1.0 * 2**850, 0.0, 0.0]
    assert exact([column, [1.0] * 6, other])[0] == math.fsum([3.0, 1e-300])
    assert exact([other, column])[0] == math.fsum(other)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ">f8"])
def test_extremes_have_no_order(dtype):
    rows = [[1, 0, -0.0, np.nan, -0.0, 3], [2, -0.0, 0, 1, -0.0, -3], [0, 0, 0, 2, -0.0, np.inf]]
    most = np.array([2, 0.0, 0.0, np.nan, -0.0, np.inf], dtype)
    least = np.array([0, -0.0, -0.0, np.nan, -0.0, -3], dtype)
    for order in permutations(rows):
        for function, wanted in ((np.maximum, most), (np.minimum, least)):
            out = np.empty(6, dtype)
            extreme(function, [np.array(row, dtype) for row in order], out)
            assert out.tobytes() == wanted.tobytes()
