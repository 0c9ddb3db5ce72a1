"""The Adasum of gradients over ranks, in the place of their sum."""

from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI

from collectives.codec import shards, slices
from collectives.communicator import AnyPlan
from collectives.phased import Part, Phased
from mpitrain.parallel.packing import ordered
from mpitrain.parallel.summation import Sum, Summand, Summation


class Adasum(Summation):
    """A :class:`~mpitrain.parallel.summation.Summation` between a mean and a sum.

    Each rank's gradients are its part of the mean: equal gradients of p ranks give the mean, and
    orthogonal ones p times it, their sum (Maleki et al. 2021).  In each tensor p counts the ranks
    whose gradient is not 0 throughout: a rank without samples changes nothing.
    """

    no_sum = "sync.combine: adasum is no sum"

    def bind(self, summand: Summand) -> Sum:
        return AdasumSum(summand)


class AdasumSum(Phased):
    """The Adasum of a bucket, each of its tensors by itself, on any number of ranks.

    An all-to-all gives each rank its shard of all vectors.  Level by level of the tree, the ranks
    sum products of the shards, which give the factors of each pair of vectors; then an all-gather
    gives all shards to all ranks.

    Cost, for n bytes of T tensors on p ranks: 2 (p-1)/p n bytes sent by a rank, as in a sum, and
    all-reduces of 24 T (p-1) bytes in log2 p levels; p/2 passes over the own shard.
    """

    algorithm = "adasum"

    def __init__(self, summand: Summand) -> None:
        """Bind the collectives; collective."""
        comm, counts = summand.comm, summand.counts
        lengths = shards(summand.own.size, comm.size) if counts is None else list(counts)
        self._parts = slices(lengths)
        self._summand, self._rank, self._size = summand, comm.rank, comm.size
        self._tensors = _inside(summand, self._parts[comm.rank])
        shape = (comm.size, max(lengths))
        self._outgoing = comm.empty(shape, summand.own.dtype)
        self._incoming = comm.empty(shape, summand.own.dtype)
        self._results = comm.empty(shape if counts is None else (0, 0), summand.own.dtype)
        self._levels = levels(comm.size)
        self._products = [np.zeros((len(level), len(self._tensors), 3)) for level in self._levels]
        plans: list[AnyPlan] = []
        if comm.size > 1:
            plans = [comm.Alltoall_init(self._outgoing, self._incoming, algorithm="pairwise")]
            plans += [ordered(comm, products.reshape(-1)) for products in self._products]
            if counts is None:
                gather = comm.Allgather_init(MPI.IN_PLACE, self._results, algorithm="ring")
                plans.append(gather)
        super().__init__(comm, plans)

    def phases(self) -> Iterator[Part]:
        own, total = self._summand.own, self._summand.total
        if self._size == 1:
            total[...] = own
            return
        scatter, *sums = self._plans
        for peer, part in enumerate(self._parts):
            self._outgoing[peer, : part.stop - part.start] = own[part]
        yield scatter
        mine = self._parts[self._rank]
        vectors = self._incoming[:, : mine.stop - mine.start].astype(np.float64)
        #: For each vector and tensor, the ranks whose gradients it has.
        counts = np.zeros((self._size, len(self._tensors)))
        for level, products, its_sum in zip(self._levels, self._products, sums, strict=False):
            for pair, (a, b) in zip(products, level, strict=True):
                for found, part in zip(pair, self._tensors, strict=True):
                    x, y = vectors[a, part], vectors[b, part]
                    found[:] = x @ y, x @ x, y @ y
            yield its_sum
            for pair, (a, b) in zip(products, level, strict=True):
                has_x, has_y = pair[:, 1] > 0, pair[:, 2] > 0
                counts[a] = np.maximum(counts[a], has_x) + np.maximum(counts[b], has_y)
                for (dot, x_square, y_square), part in zip(pair, self._tensors, strict=True):
                    vectors[a, part] *= 1 - dot / (2 * x_square) if x_square else 1.0
                    vectors[a, part] += vectors[b, part] * (
                        1 - dot / (2 * y_square) if y_square else 1.0
                    )
        for count, part in zip(counts[0], self._tensors, strict=True):
            vectors[0, part] *= count
        if self._summand.counts is not None:
            total[...] = vectors[0]
            return
        self._results[self._rank, : vectors.shape[1]] = vectors[0]
        yield sums[-1]
        for peer, part in enumerate(self._parts):
            total[part] = self._results[peer, : part.stop - part.start]


def _inside(summand: Summand, shard: slice) -> Sequence[slice]:
    """Elements of a shard that belong to each tensor of the bucket; most are empty."""
    named = summand.tensors or ({"": summand.own} if summand.own.size else {})
    first, length = shard.start, shard.stop - shard.start
    return [
        slice(max(0, part.start - first), max(0, min(length, part.stop - first)))
        for part in slices(tensor.size for tensor in named.values())
    ]


def levels(size: int) -> list[list[tuple[int, int]]]:
    """Pairs of ranks that combine their vectors, level by level; the first of a pair keeps both.

    Ranks from the largest power of two on first combine with the ranks as far below; then
    neighbours do, neighbours of neighbours and so on.  The rule is not associative, so that the
    tree is part of the result.
    """
    power = 1 << size.bit_length() - 1
    found = [[(rank - power, rank) for rank in range(power, size)]] if size > power else []
    reach = 1
    while reach < power:
        found.append([(rank, rank + reach) for rank in range(0, power, 2 * reach)])
        reach *= 2
    return found
