"""PowerSGD: a matrix as the product of two thin ones, which add up over ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress.codec import Sketch, type_of
from mpitrain.compress.options import Named, expect_least
from mpitrain.compress.seeds import generator


@dataclass(frozen=True)
class PowerSGD(Named):
    """Matrices of a low rank by one step of a power iteration (Vogels et al. 2019).

    P = M Q, summed over the ranks and made orthonormal; Q = M^T P, summed; the sum is P Q^T, and Q
    is where the next step starts.  A tensor is the matrix of its first axis and the others.
    Vectors, and matrices that save too little, are summed uncompressed with P.

    Bytes: 4 (rank (rows + columns) + elements of the rest), in two all-reduces.  Biased: with
    feedback.  Exact for sums of at most this rank, once Q has found their rows.  Cost: three thin
    products of matrices.

    Attributes:
        rank: columns of P and Q.
        min_rate: a matrix is summed uncompressed unless its bytes shrink by more than this.
        warm: start from the Q of the last step; else draw one in each.
    """

    name: ClassVar[str] = "powersgd"
    unbiased: ClassVar[bool] = False
    rank: int = 2
    min_rate: float = 2.0
    warm: bool = True

    def __post_init__(self) -> None:
        expect_least("rank", self.rank, 1)
        expect_least("min_rate", self.min_rate, 0)

    def factors(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Rows, columns and rank of a tensor's factors; None if it is summed uncompressed."""
        if len(shape) < 2 or not prod(shape):
            return None
        rows, columns = shape[0], prod(shape[1:])
        rank = min(self.rank, rows, columns)
        is_worth_it = rank * (rows + columns) * self.min_rate < rows * columns
        return (rows, columns, rank) if is_worth_it else None

    def nbytes(self, shapes: Sequence[tuple[int, ...]], itemsize: int = 4) -> int:
        total = 0
        for shape in shapes:
            found = self.factors(shape)
            total += found[2] * (found[0] + found[1]) if found else prod(shape)
        return total * itemsize

    def sketch(self, tensors: Mapping[str, Array], seed: int) -> "PowerSketch":
        return PowerSketch(self, tensors, seed)


class _Factors:
    """One matrix M and its P and Q, as views; Q's next value is float64."""

    def __init__(self, m: Array, p: Array, q: Array, words: tuple[int | str, ...]) -> None:
        self.m, self.p, self.q, self.own_q, self.words = m, p, q, np.empty_like(q), words
        self.start = self.drawn()
        self.next = self.start.copy()

    def drawn(self, *more: int) -> Array:
        """A random orthonormal Q, the same on all ranks."""
        return renewed(np.zeros(self.q.shape), generator(*self.words, *more))


class PowerSketch(Sketch):
    """PowerSGD of some tensors; see :class:`~mpitrain.compress.codec.Sketch`."""

    def __init__(self, codec: PowerSGD, tensors: Mapping[str, Array], seed: int) -> None:
        self._codec = codec
        found = {name: codec.factors(tensor.shape) for name, tensor in tensors.items()}
        kind = type_of(tensors)
        self._dense = {name: tensors[name] for name, factors in found.items() if factors is None}
        low = {name: factors for name, factors in found.items() if factors is not None}
        rest = sum(tensor.size for tensor in self._dense.values())
        first = np.empty(sum(rows * rank for rows, _, rank in low.values()) + rest, kind)
        second = np.empty(sum(columns * rank for _, columns, rank in low.values()), kind)
        self.sums = [first, second] if low else [first]
        self._factors: dict[str, _Factors] = {}
        p_at = q_at = 0
        for name, (rows, columns, rank) in low.items():
            p = first[p_at : p_at + rows * rank].reshape(rows, rank)
            q = second[q_at : q_at + columns * rank].reshape(columns, rank)
            m = tensors[name].reshape(rows, columns)
            assert np.shares_memory(m, tensors[name]), f"{name} is not contiguous"
            self._factors[name] = _Factors(m, p, q, (seed, "powersgd", name))
            p_at, q_at = p_at + p.size, q_at + q.size
        self._rest = first[p_at:]
        self._own_rest = np.empty_like(self._rest)
        self._is_pending = False

    @property
    def state(self) -> dict[str, Array]:
        """Q of each matrix, orthonormal; float64."""
        return (
            {f"{name}.q": f.start for name, f in self._factors.items()} if self._codec.warm else {}
        )

    def phases(self, step: int) -> Iterator[None]:
        all_factors = self._factors.values()
        for f in all_factors:
            q = f.start if self._codec.warm else f.drawn(step)
            f.p[...] = f.m @ q.astype(f.m.dtype)
        _gather(self._dense, self._own_rest)
        self._rest[...] = self._own_rest
        yield
        for f in all_factors:
            f.p[...] = orthonormal(f.p)
            f.q[...] = f.m.T @ f.p
            f.own_q[...] = f.q
        if all_factors:
            yield
        for f in all_factors:
            np.matmul(f.p, f.q.T, out=f.m)
            f.next[...] = renewed(orthonormal(f.q), generator(*f.words, step, "renewed"))
        _scatter(self._rest, self._dense)
        self._is_pending = True

    def sent(self, tensors: Mapping[str, Array]) -> None:
        for name, f in self._factors.items():
            tensors[name][...] = (f.p @ f.own_q.T).reshape(tensors[name].shape)
        _scatter(self._own_rest, {name: tensors[name] for name in self._dense})

    def commit(self) -> None:
        if self._is_pending:
            for f in self._factors.values():
                f.start[...] = f.next
        self._is_pending = False

    def rollback(self) -> None:
        self._is_pending = False


def _gather(tensors: Mapping[str, Array], flat: Array) -> None:
    """Write the tensors into ``flat``, one after the other."""
    at = 0
    for tensor in tensors.values():
        flat[at : at + tensor.size] = tensor.reshape(-1)
        at += tensor.size


def _scatter(flat: Array, tensors: Mapping[str, Array]) -> None:
    """Write what :func:`_gather` wrote into tensors of the same shapes."""
    at = 0
    for tensor in tensors.values():
        tensor[...] = flat[at : at + tensor.size].reshape(tensor.shape)
        at += tensor.size


def orthonormal(matrix: Array) -> Array:
    """An orthonormal basis of the columns of ``matrix``, by Gram and Schmidt, each twice.

    A column that depends linearly on those before it, up to rounding, becomes 0.

    Returns:
        A new array, float64, of the same shape.
    """
    columns = np.array(matrix.T, np.float64)
    least = 8 * np.sqrt(max(matrix.shape, default=0)) * np.finfo(matrix.dtype).eps
    for number, column in enumerate(columns):
        column /= np.abs(column).max(initial=0) or 1  # no square under- or overflows
        before, length = columns[:number], np.sqrt(column @ column)
        for _ in range(2):  # twice is enough (Giraud et al. 2005)
            column -= (before @ column) @ before
        left = np.sqrt(column @ column)
        column *= 1 / left if left > least * length else 0
    return np.ascontiguousarray(columns.T)


def renewed(basis: Array, random: np.random.Generator) -> Array:
    """Basis with random directions in place of zeros, which no power iteration would leave."""
    missing = ~basis.any(0)
    if not missing.any():
        return basis
    found = np.concatenate([basis[:, ~missing], random.normal(size=(len(basis), missing.sum()))], 1)
    return orthonormal(found)
