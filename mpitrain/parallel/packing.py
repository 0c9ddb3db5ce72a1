"""A bucket's gradients as two arrays: the elements that are coded, and the others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.codec import shards
from collectives.coded import Part
from collectives.communicator import AnyPlan, Communicator
from mpitrain.arrays import Array, Shape
from mpitrain.parallel.summation import Kept, Summand


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a bucket that are coded, or that are not.

    Attributes:
        start, stop: in the bucket.
        at: where they begin in their array.
        coded: whether they are.
    """

    start: int
    stop: int
    at: int
    coded: bool


class Packed:
    """The elements of a summand, sorted into two arrays.

    Attributes:
        coded: shape (coded elements,); the summand's own memory, if there are no others.
        rest: shape (other elements,).
        tensors: those that are coded, by name, as views into ``coded``.
        coded_counts, rest_counts: elements of each rank's shard, if the summand has shards.
        coded_total, rest_total: where the sums go: the arrays themselves, or the own shard's.
        runs: where everything lies.
    """

    def __init__(
        self, summand: Summand, coded: Callable[[Shape], bool], *, tells: bool = False
    ) -> None:
        """Lay them out.

        Args:
            summand: whose elements; without tensors it is one.
            coded: says of a tensor's shape whether it is.
            tells: one more element goes with the rest, by which all ranks know whether the
                gradients of all of them are finite.
        """
        self._is_coded, self._tells = coded, tells
        own = summand.own
        self._summand = summand
        named = summand.tensors or {"": own}
        self.runs: list[Run] = []
        ends, start = {True: 0, False: 0}, 0
        where = {}
        for name, tensor in named.items():
            is_coded = coded(tensor.shape)
            at = ends[is_coded]
            ends[is_coded] += tensor.size
            if is_coded:
                where[name] = (slice(at, ends[is_coded]), tensor.shape)
            self.runs.append(Run(start, start + tensor.size, at, is_coded))
            start += tensor.size
        self.rest = np.zeros(ends[False] + tells, own.dtype)
        self.coded = np.empty(ends[True], own.dtype) if self.rest.size else own
        self.tensors = {name: self.coded[at].reshape(shape) for name, (at, shape) in where.items()}
        self.coded_counts = self._counts(coded=True)
        self.rest_counts = self._counts(coded=False)
        self.coded_total = self._total(self.coded, self.coded_counts)
        self.rest_total = self._total(self.rest, self.rest_counts)

    def of(self, summand: Summand) -> "Packed":
        """The same of another summand of these tensors."""
        return Packed(summand, self._is_coded, tells=self._tells)

    @property
    def share(self) -> float:
        """Part of the elements that is coded."""
        return self.coded.size / max(1, self._summand.own.size)

    @property
    def part(self) -> slice:
        """Of what is coded, the elements whose codes this rank adds, where all ranks get them."""
        rank, lengths = self._summand.comm.rank, shards(self.coded.size, self._summand.comm.size)
        return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))

    @property
    def shard(self) -> slice:
        """The own shard of what is coded."""
        counts, rank = self.coded_counts, self._summand.comm.rank
        if counts is None:
            return slice(0, self.coded.size)
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    @property
    def rest_shard(self) -> slice:
        """The own shard of what is not coded."""
        counts, rank = self.rest_counts, self._summand.comm.rank
        if counts is None:
            return slice(0, self.rest.size - self._tells)
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    @property
    def rest_sum(self) -> Array:
        """The sum of what is not coded, or the own shard of it."""
        return self.rest_total[: self.rest_total.size - self._tells]

    def runs_of(self, part: slice, *, coded: bool) -> Iterator[Run]:
        """Where the elements of ``part`` of an array lie, ``at`` counted from its start."""
        for run in self.runs:
            if run.coded == coded:
                first = max(part.start, run.at)
                last = min(part.stop, run.at + run.stop - run.start)
                if first < last:
                    start = run.start + first - run.at
                    yield Run(start, start + last - first, first - part.start, coded)

    def kept(
        self, name: str, values: Array, part: slice, *, coded: bool, **more: Any
    ) -> Iterator[Kept]:
        """What is kept of the elements of ``part`` of an array, as elements of the arena.

        Args:
            name, more: as of :class:`~mpitrain.parallel.summation.Kept`.
            values: shape (elements of ``part``,).
            part: of what is coded, or is not.
            coded: which of the two.
        """
        start = self._summand.bucket.start
        for run in self.runs_of(part, coded=coded):
            own = values[run.at : run.at + run.stop - run.start]
            yield Kept(name, start + run.start, own, **more)

    def pack(self, scale: float, share: float = 1.0) -> bool:
        """Sort the gradients into the arrays; false, and zeros, if one of them is not finite.

        They are divided by ``scale``, as codes and what they leave out are of gradients, and
        multiplied by ``share``.
        """
        own = self._summand.own
        is_finite = bool(np.isfinite(own).all())
        if self.coded is not own:
            for run in self.runs:
                array = self.coded if run.coded else self.rest
                array[run.at : run.at + run.stop - run.start] = own[run.start : run.stop]
        if scale != 1.0:
            self.coded /= scale
            self.rest /= scale
        if share != 1.0:
            self.coded *= share
            self.rest *= share
        if not is_finite:
            self.coded[...] = 0
            self.rest[...] = 0
        if self._tells:
            self.rest[-1] = 0 if is_finite else np.nan
        return is_finite

    def all_finite(self, is_finite: bool) -> bool:
        """Whether the gradients of all ranks were, if they tell, after the sum; else this one's."""
        return bool(np.isfinite(self.rest_total[-1])) if self._tells else is_finite

    def unpack(self, scale: float, is_finite: bool) -> None:
        """Put the sums together; not a number, all of them, unless ``is_finite``."""
        total = self._summand.total
        if not is_finite:
            total[...] = np.nan
            return
        if scale != 1.0:
            self.coded_total *= scale
            self.rest_total *= scale
        if self.coded is self._summand.own:
            if self.coded_total is not total:
                total[...] = self.coded_total
            return
        low, high = self._bounds()
        seen = {True: 0, False: 0}
        for run in self.runs:
            first, last = max(low, run.start), min(high, run.stop)
            if first < last:
                source = self.coded_total if run.coded else self.rest_total
                start = seen[run.coded]
                total[first - low : last - low] = source[start : start + last - first]
                seen[run.coded] += last - first

    def bind_rest(self, comm: Communicator) -> AnyPlan | None:
        """The sum of what is not coded, if there is any; collective."""
        if not self.rest.size:
            return None
        if self.rest_counts is None:
            return ordered(comm, self.rest)
        return comm.Reduce_scatter_init(
            self.rest, self.rest_total, list(self.rest_counts), algorithm="ring"
        )

    def _bounds(self) -> tuple[int, int]:
        """Of the own shard in the bucket."""
        counts, rank = self._summand.counts, self._summand.comm.rank
        if counts is None:
            return 0, self._summand.own.size
        return sum(counts[:rank]), sum(counts[: rank + 1])

    def _counts(self, *, coded: bool) -> list[int] | None:
        if self._summand.counts is None:
            return None
        ends = np.cumsum([0, *self._summand.counts]).tolist()
        return [
            sum(
                max(0, min(high, run.stop) - max(low, run.start))
                for run in self.runs
                if run.coded == coded
            )
            for low, high in pairwise(ends)
        ]

    def _total(self, array: Array, counts: Sequence[int] | None) -> Array:
        if counts is None:
            return array
        return np.empty(counts[self._summand.comm.rank], array.dtype)


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

    def Wait(self) -> None:
        """Complete all of them."""
        for plan in self._plans:
            plan.Wait()


def ordered(comm: Communicator, array: Array) -> AnyPlan:
    """The all-reduce of an array in place, by an algorithm of ours: its messages have tags of their
    own, so that ranks may start it in another order among their sums, as the library's may not.

    Cost: 2 log2 p rounds, 2 (p-1)/p times its bytes sent by a rank.
    """
    return comm.Allreduce_init(MPI.IN_PLACE, array, algorithm="halving_doubling")
