"""Choice of a codec by timing sums of gradients of the job's shapes on this link."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.waiting import give_way
from mpitrain.parallel.arena import DATA, Arena
from mpitrain.parallel.store import Allocate
from mpitrain.parallel.summation import Sum, Summand, Summation

#: Codecs that ``auto`` tries beside dense sums, from the one that changes gradients least on.
CANDIDATES = ("bf16", "int8", "powersgd:rank=4")
#: A code is taken if it takes less than this part of the time of dense sums.
_PAYS = 0.8
_RUNS = 5


class CodecChoice(NamedTuple):
    """The chosen codec.

    Attributes:
        codec: value of ``compress.codec``.
        why: one sentence, with the seconds of each codec.
    """

    codec: str
    why: str


def choose(
    comm: Communicator,
    groups: Mapping[str, Communicator],
    arena: Arena,
    itemsize: int,
    bucket_bytes: int,
    make: Callable[[str], Summation],
    allocate: Allocate,
) -> CodecChoice:
    """Time the sum of one step's gradients by each codec; collective.

    The fastest of five runs on the slowest rank counts.

    Args:
        comm: all ranks of the job.
        groups: ranks that sum, for each group of the arena.
        arena: layout of the parameters of this rank.
        itemsize: bytes of a gradient.
        bucket_bytes: least size of a bucket.
        make: makes the summation for a codec.
        allocate: ``allocate(size, dtype)`` makes the memory of the gradients.
    """
    most = comm.allreduce(groups[DATA].size if DATA in groups else 1, MPI.MAX)
    if most == 1:
        return CodecChoice("none", "a single replica sends nothing")
    seconds = {}
    for codec in ("none", *CANDIDATES):
        own = _seconds(groups, arena, itemsize, bucket_bytes, make(codec), allocate)
        seconds[codec] = comm.allreduce(own, MPI.MAX)
    dense, fastest = seconds["none"], min(CANDIDATES, key=seconds.__getitem__)
    told = ", ".join(f"{codec} {1e3 * value:.3g} ms" for codec, value in seconds.items())
    if seconds[fastest] < _PAYS * dense:
        return CodecChoice(fastest, f"the fastest on this link ({told})")
    return CodecChoice("none", f"on this link coding takes longer than it saves ({told})")


def _seconds(
    groups: Mapping[str, Communicator],
    arena: Arena,
    itemsize: int,
    bucket_bytes: int,
    summation: Summation,
    allocate: Allocate,
) -> float:
    """Seconds of one step's sums on this rank."""
    dtype = np.dtype(f"f{itemsize}")
    flat = allocate(arena.size, dtype)
    drawn = np.random.default_rng(0).normal(size=arena.size).astype(dtype)
    sums: list[Sum] = []
    for bucket in arena.buckets(bucket_bytes, itemsize):
        if bucket.group == DATA:
            own = flat[bucket.start : bucket.stop]
            tensors = arena.inside(bucket, own)
            sums.append(summation.bind(Summand(bucket, groups[DATA], own, tensors, own)))
    found = []
    for run in range(_RUNS):
        flat[...] = drawn
        summation.begin(run, 1.0)
        if DATA in groups:
            groups[DATA].barrier()
        start = perf_counter()
        for one in sums:
            one.Start()
        left = list(sums)
        while left := [one for one in left if not one.Test()]:
            give_way()
        found.append(perf_counter() - start)
        summation.commit()
    for one in sums:
        one.Free()
    return min(found)
