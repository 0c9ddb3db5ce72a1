"""Buckets of gradients whose sums the tests bind by themselves."""

from itertools import pairwise

import numpy as np

from mpitrain.parallel.arena import DATA, Bucket
from mpitrain.parallel.summation import Summand
from tests.mpi.mpitrain.layouts import RANKS


def summand(comm, own, shapes, total=None, counts=None):
    """The gradients ``own`` of tensors t0, t1, ...; without ``total``, the sum replaces them."""
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)]).tolist()
    tensors = {
        f"t{i}": own[a:b].reshape(shape)
        for i, ((a, b), shape) in enumerate(zip(pairwise(ends), shapes, strict=True))
    }
    bucket = Bucket(0, own.size, frozenset({0}), DATA)
    return Summand(bucket, comm, own, tensors, own if total is None else total, counts)


def shards(n):
    """Elements of each rank's shard."""
    return [n // RANKS + (rank < n % RANKS) for rank in range(RANKS)]
