"""Bytes that a sum of gradients sends, by formula: what plans say, and what counts must be."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from collectives.codec import shards
from mpitrain.arrays import Shape
from mpitrain.compress import Linear, Sparse
from mpitrain.compress.adasum import levels
from mpitrain.parallel.compressed_sum import Compression

#: Of a message of the sparse all-reduce: how many pairs follow.
_HEADER = 8


def dense_bytes(nbytes: int, ranks: int) -> int:
    """Of all ranks together, for an all-reduce by an algorithm of the least volume."""
    return 2 * (ranks - 1) * nbytes


def sparse_bytes(n: int, pairs: int, ranks: int, itemsize: int = 4) -> int:
    """Of all ranks together, for the sparse all-reduce of n elements of which all ranks choose the
    same ``pairs``."""
    rounds = ranks.bit_length() - 1
    doubled = 1 << rounds
    messages = doubled * rounds + 2 * (ranks - doubled)
    return messages * (_HEADER + min(pairs * (4 + itemsize), n * itemsize))


def coded_bytes(
    how: Compression,
    shapes: Sequence[Shape],
    ranks: int,
    itemsize: int = 4,
    pairs: int = 0,
    shard: int | None = None,
    nodes: int | None = None,
) -> int:
    """Of all ranks together, for the sum of a bucket.

    Args:
        how: how gradients are coded.
        shapes: of the tensors in the bucket.
        ranks: that sum.
        itemsize: bytes of a gradient.
        pairs: elements that each rank chooses, the same ones, by a ``Sparse`` code.
        shard: where each rank gets its shard of the sum alone, and of what ``Codec`` codes: the
            most coded elements of one.
        nodes: on which the ranks are, where one of each codes its node's sum.
    """
    if how.nodes and nodes is not None:
        n = itemsize * sum(map(prod, shapes))
        if nodes == 1 or not any(map(how.codes, shapes)):
            return dense_bytes(n, ranks)
        inside = 2 * (ranks - nodes) * n
        return inside + coded_bytes(replace(how, nodes=False), shapes, nodes, itemsize, pairs)
    coded = [shape for shape in shapes if how.codes(shape)]
    rest = itemsize * sum(prod(shape) for shape in shapes if not how.codes(shape))
    sent, n, code = dense_bytes(rest, ranks), sum(map(prod, coded)), how.code
    if shard is not None:
        assert not isinstance(code, Linear | Sparse), "these give every rank the whole sum"
        return sent // 2 + (ranks * (ranks - 1) * code.nbytes(shard) if n else 0)
    if not n:
        return sent
    if isinstance(code, Linear):
        return sent + dense_bytes(code.nbytes(coded, itemsize), ranks)
    if isinstance(code, Sparse):
        return sent + sparse_bytes(n, pairs, ranks, itemsize)
    if how.gathers(ranks):
        return sent + ranks * (ranks - 1) * code.nbytes(n)
    return sent + 2 * ranks * (ranks - 1) * code.nbytes(shards(n, ranks)[0])


def adasum_bytes(shapes: Sequence[Shape], ranks: int, itemsize: int = 4) -> int:
    """Of all ranks together, for the Adasum of a bucket."""
    block = shards(sum(map(prod, shapes)), ranks)[0]
    products = sum(dense_bytes(24 * len(level) * len(shapes), ranks) for level in levels(ranks))
    return 2 * ranks * (ranks - 1) * block * itemsize + products
