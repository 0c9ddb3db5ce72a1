"""ATOMO: random singular vectors."""

from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

import numpy as np

from collectives.codec import Bytes, Draw
from mpitrain.arrays import Array
from mpitrain.compress.options import Named, expect_least


@dataclass(frozen=True)
class Atomo(Named):
    """``rank`` random singular vectors, right on average (Wang et al. 2018); slow.

    Atom i of M = sum s_i u_i v_i^T is sent with probability p_i, times 1/p_i; p_i = min(1, c s_i)
    with c such that they add up to ``rank``.  No other unbiased choice has less variance, which is
    sum s_i^2 (1/p_i - 1).  Atoms are drawn systematically, so that their number is always the same.

    Bytes: 4 rank (rows + columns), or 4n where that is less.  Cost: a singular value decomposition
    of each message, many times what the others take.  Unbiased, without feedback.

    Attributes:
        rank: atoms of a message.
        columns: columns of the matrix, whose last row is filled up with zeros; 0 for the most
            square one.
    """

    name: ClassVar[str] = "atomo"
    unbiased: ClassVar[bool] = True
    feedback: ClassVar[str] = "never"
    rank: int = 2
    columns: int = 0

    def __post_init__(self) -> None:
        expect_least("rank", self.rank, 1)
        expect_least("columns", self.columns, 0)

    def shape(self, n: int) -> tuple[int, int, int]:
        """Rows, columns and atoms of the matrix of n numbers; 0 atoms: sent uncompressed."""
        columns = min(n, self.columns or isqrt(max(n - 1, 0)) + 1)
        rows = -(-n // columns) if n else 0
        atoms = min(self.rank, rows, columns)
        return rows, columns, atoms if atoms * (rows + columns) < n else 0

    def nbytes(self, n: int) -> int:
        rows, columns, atoms = self.shape(n)
        return 4 * (atoms * (rows + columns) or n)

    def encode(self, x: Array, code: Bytes, draw: Draw) -> None:
        rows, columns, atoms = self.shape(len(x))
        numbers = code.view(np.float32)
        most = float(np.finfo(np.float32).max)
        if not atoms:
            numbers[...] = np.clip(x, -most, most)
            return
        matrix = np.zeros((rows, columns))
        matrix.reshape(-1)[: len(x)] = x
        size = np.abs(matrix).max() or 1.0
        left, values, right = np.linalg.svd(matrix / size, full_matrices=False)
        shares = probabilities(values, atoms)
        chosen = systematic(shares, draw().random())
        factors = np.zeros((atoms, rows + columns))
        with np.errstate(over="ignore"):
            scales = np.minimum(size * values[chosen] / shares[chosen], most)
        factors[: len(chosen), :rows] = left[:, chosen].T * scales[:, None]
        factors[: len(chosen), rows:] = right[chosen]
        numbers[...] = factors.reshape(-1)

    def decode(self, code: Bytes, x: Array) -> None:
        rows, _, atoms = self.shape(len(x))
        numbers = code.view(np.float32)
        if not atoms:
            x[...] = numbers
            return
        factors = numbers.reshape(atoms, -1).astype(np.float64)
        most = float(np.finfo(x.dtype).max)
        product = np.clip(factors[:, :rows].T @ factors[:, rows:], -most, most)
        x[...] = product.reshape(-1)[: len(x)]


def probabilities(values: Array, budget: int) -> Array:
    """min(1, c values) of falling values, which add up to ``budget``, or to the number above 0."""
    shares = np.zeros(len(values))
    count = int((values > np.finfo(np.float64).eps * values.max(initial=0)).sum())
    sure = 0
    while sure < min(budget, count):
        rest = values[sure:count]
        shares[sure:count] = (budget - sure) * rest / rest.sum()
        if shares[sure] <= 1:
            break
        shares[sure] = 1
        sure += 1
    return np.minimum(shares, 1)


def systematic(shares: Array, die: float) -> Array:
    """Indices drawn with these probabilities; their number is the sum of these (Madow 1949)."""
    ends = np.cumsum(shares)
    if len(ends):
        ends[-1] = np.rint(ends[-1])  # without what rounding left
    marks = np.floor(ends + die)
    return np.flatnonzero(np.diff(marks, prepend=0.0) > 0)
