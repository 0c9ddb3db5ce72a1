"""A bucket's gradients as two arrays: the coded elements, and the rest."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.codec import shards, slices
from collectives.communicator import AnyPlan, Communicator
from collectives.phased import Part
from mpitrain.arrays import Array, Shape
from mpitrain.parallel.summation import KeptElements, Summand


@dataclass(frozen=True)
class ElementRun:
    """Consecutive elements of a bucket that are coded, or that are not.

    Attributes:
        start, stop: elements of the bucket.
        at: first element in the array of the half.
        coded: whether the elements are coded.
    """

    start: int
    stop: int
    at: int
    coded: bool


@dataclass
class Half:
    """The coded elements of a bucket, or the rest.

    Attributes:
        array: the rank's elements, and for the rest perhaps one more, see :class:`Packed`.
        counts: elements of each rank's shard; None: each rank gets the whole sum.
        shard: elements whose sum this rank gets.
        total: memory of the sum: ``array`` itself, or an array of the shard.
    """

    array: Array
    counts: list[int] | None
    shard: slice

    def __post_init__(self) -> None:
        size = self.shard.stop - self.shard.start
        is_whole = self.counts is None
        self.total = self.array if is_whole else np.empty(size, self.array.dtype)

    @property
    def sum(self) -> Array:
        """The sum of the shard."""
        return self.total[: self.shard.stop - self.shard.start]

    def take_shard(self) -> None:
        """The own array holds the whole sum: keep the shard."""
        if self.counts is not None:
            self.total[...] = self.array[self.shard]


class Packed:
    """The elements of a summand, sorted into two arrays.

    Attributes:
        coded: coded elements; their array is the summand's own memory, if there are no others.
        rest: other elements.
        tensors: coded tensors, by name, as views.
        runs: places of all elements.
    """

    def __init__(
        self, summand: Summand, coded: Callable[[Shape], bool], *, tells: bool = False
    ) -> None:
        """Lay the elements out; ``coded`` says whether tensors of a shape are coded.

        ``tells``: one more element of the rest shows all ranks whether all gradients are finite.
        """
        self._tells, self._summand = tells, summand
        own = summand.own
        self.runs: list[ElementRun] = []
        ends, start = {True: 0, False: 0}, 0
        where = {}
        for name, tensor in (summand.tensors or {"": own}).items():
            is_coded = coded(tensor.shape)
            at = ends[is_coded]
            ends[is_coded] += tensor.size
            if is_coded:
                where[name] = (slice(at, ends[is_coded]), tensor.shape)
            self.runs.append(ElementRun(start, start + tensor.size, at, is_coded))
            start += tensor.size
        rest = np.zeros(ends[False] + tells, own.dtype)
        array = np.empty(ends[True], own.dtype) if rest.size else own
        self.tensors = {name: array[at].reshape(shape) for name, (at, shape) in where.items()}
        self.coded = self._half(array, ends[True], coded=True)
        self.rest = self._half(rest, ends[False], coded=False)

    @property
    def share(self) -> float:
        """Part of the elements that is coded."""
        return self.coded.array.size / max(1, self._summand.own.size)

    @property
    def part(self) -> slice:
        """Coded elements whose codes this rank adds up, where all ranks get the sum."""
        comm = self._summand.comm
        return slices(shards(self.coded.array.size, comm.size))[comm.rank]

    def runs_of(self, part: slice, *, coded: bool) -> Iterator[ElementRun]:
        """Places of the elements ``part`` of a half; ``at`` counts from the part's start."""
        for run in self.runs:
            if run.coded == coded:
                first = max(part.start, run.at)
                last = min(part.stop, run.at + run.stop - run.start)
                if first < last:
                    start = run.start + first - run.at
                    yield ElementRun(start, start + last - first, first - part.start, coded)

    def kept(
        self, name: str, values: Array, part: slice, *, coded: bool, **more: Any
    ) -> Iterator[KeptElements]:
        """Values kept for the elements ``part`` of a half, as elements of the arena.

        ``name`` and ``more`` are attributes of :class:`~mpitrain.parallel.summation.KeptElements`.
        """
        start = self._summand.bucket.start
        for run in self.runs_of(part, coded=coded):
            own = values[run.at : run.at + run.stop - run.start]
            yield KeptElements(name, start + run.start, own, **more)

    def pack(self, scale: float, share: float = 1.0) -> bool:
        """Sort the gradients into the halves, divided by ``scale`` and multiplied by ``share``.

        Codes, and what they leave out, are in units of unscaled gradients.  Returns whether all
        gradients are finite; if not, the halves are 0.
        """
        own = self._summand.own
        is_finite = bool(np.isfinite(own).all())
        halves = self.coded.array, self.rest.array
        if self.coded.array is not own:
            for run in self.runs:
                array = halves[not run.coded]
                array[run.at : run.at + run.stop - run.start] = own[run.start : run.stop]
        for array in halves:
            if scale != 1.0:
                array /= scale
            if share != 1.0:
                array *= share
            if not is_finite:
                array[...] = 0
        if self._tells:
            self.rest.array[-1] = 0 if is_finite else np.nan
        return is_finite

    def all_finite(self, is_finite: bool) -> bool:
        """Whether all ranks' gradients were finite, if they tell, after the sum; else ours."""
        return bool(np.isfinite(self.rest.total[-1])) if self._tells else is_finite

    def unpack(self, scale: float, is_finite: bool) -> None:
        """Put the sums together; the total is not a number unless ``is_finite``."""
        total, coded, rest = self._summand.total, self.coded, self.rest
        if not is_finite:
            total[...] = np.nan
            return
        if scale != 1.0:
            coded.total *= scale
            rest.total *= scale
        if coded.array is self._summand.own:
            if coded.total is not total:
                total[...] = coded.total
            return
        bounds = _shard(self._summand.counts, self._summand.comm.rank, self._summand.own.size)
        seen = {True: 0, False: 0}
        for run in self.runs:
            first, last = max(bounds.start, run.start), min(bounds.stop, run.stop)
            if first < last:
                source = coded.total if run.coded else rest.total
                start = seen[run.coded]
                own = slice(first - bounds.start, last - bounds.start)
                total[own] = source[start : start + last - first]
                seen[run.coded] += last - first

    def bind_rest(self, comm: Communicator) -> AnyPlan | None:
        """The sum of the rest, if there is any; collective."""
        rest = self.rest
        if not rest.array.size:
            return None
        if rest.counts is None:
            return ordered(comm, rest.array)
        return comm.Reduce_scatter_init(rest.array, rest.total, rest.counts, algorithm="ring")

    def _half(self, array: Array, size: int, *, coded: bool) -> Half:
        counts = None
        if self._summand.counts is not None:
            runs = [run for run in self.runs if run.coded == coded]
            counts = [
                sum(max(0, min(part.stop, run.stop) - max(part.start, run.start)) for run in runs)
                for part in slices(self._summand.counts)
            ]
        return Half(array, counts, _shard(counts, self._summand.comm.rank, size))


def _shard(counts: Sequence[int] | None, rank: int, size: int) -> slice:
    return slice(0, size) if counts is None else slices(counts)[rank]


class Together:
    """Plans that run at the same time, as one."""

    def __init__(self, plans: Sequence[Part]) -> None:
        self._plans = plans

    def Start(self) -> None:
        """Begin all of them."""
        for plan in self._plans:
            plan.Start()

    def Test(self) -> bool:
        """Move them along; true once all are complete."""
        return all([plan.Test() for plan in self._plans])


def ordered(comm: Communicator, array: Array) -> AnyPlan:
    """The all-reduce of an array in place, by an algorithm whose messages have tags of their own.

    So ranks may start it in another order among their sums, which the library's does not allow.
    Cost: 2 log2 p rounds, 2 (p-1)/p times its bytes sent by a rank.
    """
    return comm.Allreduce_init(MPI.IN_PLACE, array, algorithm="halving_doubling")
