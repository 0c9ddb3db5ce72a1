"""Bytes that a sum of gradients sends, by formula, for ``mpitrain plan`` and tests of counts."""

from collections.abc import Sequence
from math import prod

from collectives.codec import shards
from collectives.sparse_vectors import GAP_BYTES
from mpitrain.arrays import Shape
from mpitrain.compress.codec import LinearCodec, Sparse
from mpitrain.parallel.adasum_sum import levels
from mpitrain.parallel.compressed_summation import CodingOptions

#: Bytes before the pairs in a message of the sparse all-reduce.
_HEADER = 16


def dense_bytes(nbytes: int, ranks: int) -> int:
    """Bytes sent by all ranks together in an all-reduce of least volume."""
    return 2 * (ranks - 1) * nbytes


def sparse_bytes(n: int, pairs: int, ranks: int, itemsize: int = 4, splits: bool = False) -> int:
    """Bytes sent by all ranks together in a sparse all-reduce of n elements.

    All ranks choose the same ``pairs``, less than 65,536 places apart, and evenly if a
    ``split_allgather`` or a ``pruned_ring`` ``splits`` them.
    """
    nbytes = min(pairs * (GAP_BYTES + itemsize), n * itemsize)
    if splits:
        return 2 * (ranks - 1) * (ranks * _HEADER + nbytes)
    rounds = ranks.bit_length() - 1
    doubled = 1 << rounds
    messages = doubled * rounds + 2 * (ranks - doubled)
    return messages * (_HEADER + nbytes)


def coded_bytes(
    how: CodingOptions,
    shapes: Sequence[Shape],
    ranks: int,
    itemsize: int = 4,
    pairs: int = 0,
    shard: int | None = None,
) -> int:
    """Bytes sent by all ranks together in the sum of a bucket.

    Args:
        how: how gradients are coded.
        shapes: shapes of the tensors in the bucket.
        ranks: number of ranks.
        itemsize: bytes of a gradient.
        pairs: elements that each rank chooses, the same ones, by a ``Sparse`` code.
        shard: most coded elements of a rank's shard, where each rank gets only that of the sum.
    """
    coded = [shape for shape in shapes if how.codes(shape)]
    rest = itemsize * sum(prod(shape) for shape in shapes if not how.codes(shape))
    sent, n, codec = dense_bytes(rest, ranks), sum(map(prod, coded)), how.codec
    if shard is not None:
        assert not isinstance(codec, LinearCodec | Sparse), "these give every rank the whole sum"
        return sent // 2 + (ranks * (ranks - 1) * codec.nbytes(shard) if n else 0)
    if not n:
        return sent
    if isinstance(codec, LinearCodec):
        return sent + dense_bytes(codec.nbytes(coded, itemsize), ranks)
    if isinstance(codec, Sparse):
        splits = how.table.sparse != "recursive_doubling"
        return sent + sparse_bytes(n, pairs, ranks, itemsize, splits)
    return sent + 2 * ranks * (ranks - 1) * codec.nbytes(shards(n, ranks)[0])


def adasum_bytes(shapes: Sequence[Shape], ranks: int, itemsize: int = 4) -> int:
    """Bytes sent by all ranks together in the Adasum of a bucket."""
    block = shards(sum(map(prod, shapes)), ranks)[0]
    products = sum(dense_bytes(24 * len(level) * len(shapes), ranks) for level in levels(ranks))
    return 2 * ranks * (ranks - 1) * block * itemsize + products
