"""Means of clients' changes as whole numbers, which add up to the same bits in any order.

A change ``x - w`` is ``a * unit + b * unit / 2**places`` with whole ``a`` and ``b`` of 64 bits and
one unit for all clients.  Sums of whole numbers have no order: the mean of a round is the same on
any number of ranks.  The mean of one client is its change, except for parts below
``2**(-2 * places)`` of the largest: 2**-80 where weights add up to a million.
"""

from dataclasses import dataclass
from math import frexp, ldexp

import numpy as np

from mpitrain.arrays import Array

#: Below this power of two a unit would be subnormal.
_LEAST = -900


#: Numbers that are not finite are found in the result.
@np.errstate(over="ignore", invalid="ignore")
def difference(x: Array, w: Array) -> tuple[Array, Array]:
    """``x - w`` as a rounded difference and its rounding error, float64 (Knuth's TwoSum)."""
    x, w = x.astype(np.float64, copy=False), w.astype(np.float64, copy=False)
    total = x - w
    of_w = x - total
    return total, (x - (total + of_w)) + (of_w - w)


def subtract(x: Array, mean: tuple[Array, Array]) -> Array:
    """``x - mean``, rounded to float64; ``mean`` as :meth:`Grid.mean` gives it."""
    total, rest = difference(x, mean[0])
    found: Array = total + (rest - mean[1])
    return found


@dataclass(frozen=True)
class Grid:
    """The whole numbers of a round.

    Attributes:
        exponent: every change is less than 2 to this power.
        places: bits of each word, but for its sign and the room of the sum.
    """

    exponent: int
    places: int

    @classmethod
    def of(cls, largest: float, weight: int) -> "Grid":
        """For changes of at most ``largest``, whose weights add up to ``weight``."""
        exponent = frexp(largest)[1] if largest else 0
        return cls(max(exponent, _LEAST), 60 - weight.bit_length())

    def words(self, change: tuple[Array, Array]) -> Array:
        """Whole numbers of a change in two parts, of shape (2, elements), int64."""
        found = np.zeros((2, change[0].size), np.int64)
        for part in change:
            scaled = part * ldexp(1.0, self.places - self.exponent)
            high = np.rint(scaled)
            # Both are multiples of the last bit of ``scaled``, so nothing is rounded here.
            low = np.rint((scaled - high) * ldexp(1.0, self.places))
            found += np.stack([high, low]).astype(np.int64)
        return found

    def mean(self, total: Array, weight: int) -> tuple[Array, Array]:
        """The mean in two parts, float64: ``total`` is the sum of the words times their weights."""
        high, rest = np.divmod(total[0], weight)
        low, part = np.divmod((rest << self.places) + total[1], weight)
        wide = high.astype(np.float64)
        unit = ldexp(1.0, self.exponent - self.places)
        less = (high - wide.astype(np.int64)).astype(np.float64) * unit
        less += (low + part / weight) * ldexp(unit, -self.places)
        return wide * unit, less
