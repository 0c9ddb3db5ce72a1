"""Sums of several arrays, each element the exact sum, rounded once.

Such a sum has no order: it is the same for any number of ranks, any algorithm, and whoever comes
first.  Numbers are split, without an error, into parts that float64 can add without one
(ExtractVector of Rump, Ogita and Oishi, "Accurate Floating-Point Summation", SIAM J. Sci. Comput.
31, 2008); the few exact partial sums are then made non-overlapping (Priest, 1991) and rounded.

Cost: some ten passes over each array, twice or three times for numbers of the same size, and more
where the largest of an element is 2^50 times the smallest; a plain sum is one.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.execution.memory import Items

Floats = npt.NDArray[np.float64]

#: Numbers of a block: with those of some ranks, they stay in a level-2 cache.
_BLOCK = 1 << 15
#: The bits of a float64's exponent.
_EXPONENT = 0x7FF << 52
#: Partial sums might overflow from here on: such numbers are scaled down first.
_HUGE = 2.0**1000
_LESS = 2.0**-100


def exact_sum(terms: Sequence[Items], out: Items) -> None:
    """Writes the rounded exact sums of ``terms`` into ``out``.

    As in IEEE 754, to nearest, ties to even; of infinities what any order gives; NaN is always the
    same one; 0.0 for a sum of zero, unless all terms are -0.0.

    Args:
        terms: 1-D, of the same length and floating-point or complex type, up to 64 bits a part, in
            any byte order.
        out: an array of that type; it may be one of ``terms``.
    """
    if out.dtype.kind == "c":
        part = np.dtype(f"f{out.itemsize // 2}").newbyteorder(out.dtype.byteorder)
        exact_sum([np.ascontiguousarray(term).view(part) for term in terms], out.view(part))
        return
    if not out.dtype.isnative:
        native = np.empty(out.size, out.dtype.newbyteorder("="))
        exact_sum([term.astype(native.dtype) for term in terms], native)
        out[...] = native
        return
    block = max(1024, _BLOCK // max(1, len(terms)))
    with np.errstate(all="ignore"):
        if len(terms) == 2 and out.dtype in (np.float64, np.float32):  # rounded once as it is
            np.add(terms[0], terms[1], out=out)
            out[np.isnan(out)] = np.nan
            return
        for start in range(0, out.size, block):
            here = slice(start, start + block)
            out[here] = _sum(np.array([term[here] for term in terms], np.float64), out.dtype)


def extreme(function: np.ufunc, terms: Sequence[Items], out: Items) -> None:
    """Writes the largest or least of ``terms`` into ``out``: NaN, always the same one, if one of
    them is NaN; 0.0 is larger than -0.0.

    Args:
        function: ``np.maximum`` or ``np.minimum``.
        terms, out: as in :func:`exact_sum`, and not complex.
    """
    signs = np.array([np.signbit(term) for term in terms])
    negative = signs.all(axis=0) if function is np.maximum else signs.any(axis=0)
    with np.errstate(all="ignore"):
        found = terms[0].copy()
        for term in terms[1:]:
            function(found, term, out=found)
        np.copyto(found, np.where(negative, -0.0, 0.0), where=found == 0, casting="unsafe")
        found[np.isnan(found)] = np.nan
    out[...] = found


def _sum(terms: Floats, dtype: "np.dtype[Any]") -> Items:
    """The rounded sums of a block of numbers of each term; ``terms`` is overwritten."""
    with_infinity = np.where(np.isfinite(terms), 0, terms).sum(axis=0)
    odd = ~np.isfinite(terms).all(axis=0)
    terms[:, odd] = 0
    negative = np.signbit(terms).all(axis=0)
    largest = np.abs(terms).max(axis=0)
    huge = np.flatnonzero(largest >= _HUGE)
    # Without the least ones a power of two more or less changes nothing but the exponent.
    least = np.where(terms[:, huge] == 0, np.inf, np.abs(terms[:, huge])).min(
        axis=0, initial=np.inf
    )
    one_by_one = huge[least < 1 / _HUGE**0.5]
    aside = [_one(column) for column in terms[:, one_by_one].T]
    terms[:, one_by_one] = 0
    terms[:, huge] *= _LESS
    result = _rounded(_expansion(_exact_parts(terms)), dtype)
    result[huge] /= _LESS
    result[one_by_one] = aside
    result[negative & (result == 0)] = -0.0
    result[odd] = with_infinity[odd]
    result[np.isnan(result)] = np.nan
    return result


def _one(terms: Floats) -> float:
    """The sum for one element whose terms span all that a float64 can."""
    total = sum(map(Fraction, terms.tolist()), Fraction())
    try:
        return float(total)
    except OverflowError:
        return np.inf if total > 0 else -np.inf


def _exact_parts(terms: Floats) -> list[Floats]:
    """A few arrays with the same sum, each itself exact; ``terms`` ends as zeros."""
    # A sum of n multiples of one unit has log2(n) bits more than each.
    growth = 2.0 ** (len(terms) + 1).bit_length() * 2
    parts: list[Floats] = []
    high = np.empty_like(terms)
    while (largest := np.abs(terms, out=high).max(axis=0)).any():
        # Its power of two, or 0 where it is subnormal: these all have one unit anyway.
        sigma = (largest.view(np.int64) & _EXPONENT).view(np.float64) * growth
        np.add(terms, sigma, out=high)
        np.subtract(high, sigma, out=high)
        np.subtract(terms, high, out=terms)
        parts.append(high.sum(axis=0))
    return parts or [np.zeros(terms.shape[1])]


def _expansion(parts: list[Floats]) -> list[Floats]:
    """The parts with the sum unchanged, each at most half a last place of the one before."""
    moved = True
    while moved:
        moved = False
        for i in range(len(parts) - 1, 0, -1):
            total, error = _two_sum(parts[i - 1], parts[i])
            moved = moved or bool((total != parts[i - 1]).any())
            parts[i - 1], parts[i] = total, error
    return parts


def _two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The rounded sum, and what rounding took (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _rounded(parts: list[Floats], dtype: "np.dtype[Any]") -> Items:
    """The sum of an expansion, rounded once to ``dtype``."""
    nothing = np.zeros_like(parts[0])
    first, second, third, *_ = [*parts, nothing, nothing]
    if dtype == np.float64:
        # Rounded already, unless it is half way between two numbers but for the third part.
        beyond = np.nextafter(first, np.copysign(np.inf, second))
        tie = (second != 0) & (beyond - first == 2 * second)
        result: Items = np.where(tie & (np.sign(second) == np.sign(third)), beyond, first)
        return result
    wide = _to_odd(first, second)
    if dtype not in (np.float32, np.float16):  # bfloat16 is made of float32
        narrow = wide.astype(np.float32)
        wide = _to_odd(narrow, wide - narrow)
    return wide.astype(dtype)


def _to_odd(rounded: Items, rest: Floats) -> Items:
    """The sum rounded to odd: of its two neighbours, the one whose last bit is 1.

    A second rounding to fewer bits then gives the result of a single rounding (Boldo and Melquiond,
    "Emulation of FMA and Correctly Rounded Sums", IEEE Trans. Comput. 57, 2008).
    """
    even = rounded.view(f"i{rounded.itemsize}") & 1 == 0
    other = np.nextafter(rounded, np.copysign(np.inf, rest).astype(rounded.dtype))
    odd: Items = np.where((rest != 0) & even, other, rounded)
    return odd
