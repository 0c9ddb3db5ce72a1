"""The mean over the workers of some tensors, on its way while the workers go on."""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.waiting import give_way
from mpitrain.arrays import Array
from mpitrain.parallel.arena import Bucket, Tensor
from mpitrain.parallel.summation import Dense, Sum, Summand, Summation


@dataclass(frozen=True)
class Segment:
    """Elements ``start <= i < stop`` of the arena, at ``at`` in a selection."""

    start: int
    stop: int
    at: int


class Selection:
    """Some tensors of an arena, one after the other in an array of their own.

    Group follows group, and in a group the tensors are in the order that is given: ranks that hold
    copies of a tensor have it at the same place of arrays that are equally long, so that sums of
    them round alike.

    Attributes:
        size: elements.
        blocks: the tensors of each group.
        runs: where everything lies.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """``tensors``: in the order of the model, the same for all ranks that have a tensor."""
        ordered = sorted(tensors, key=lambda tensor: tensor.group)  # sort() keeps the order
        self.blocks = {
            group: list(members) for group, members in groupby(ordered, lambda tensor: tensor.group)
        }
        self.runs: list[Segment] = []
        self.size = 0
        for tensor in ordered:
            last = self.runs[-1] if self.runs else None
            if last and last.stop == tensor.start:
                self.runs[-1] = Segment(last.start, tensor.stop, last.at)
            else:
                self.runs.append(Segment(tensor.start, tensor.stop, self.size))
            self.size += tensor.stop - tensor.start

    def take(self, flat: Array, into: Array | None = None) -> Array:
        """The elements of ``flat``, in the arena's layout, copied ``into`` shape (size,)."""
        into = np.empty(self.size, flat.dtype) if into is None else into
        for run in self.runs:
            into[run.at : run.at + run.stop - run.start] = flat[run.start : run.stop]
        return into

    def put(self, values: Array, flat: Array) -> None:
        """Copy ``values``, of shape (size,), to where they lie in ``flat``."""
        for run in self.runs:
            flat[run.start : run.stop] = values[run.at : run.at + run.stop - run.start]


class Exchange:
    """The mean over the workers of a selection's elements, started again and again.

    Cost: an all-reduce for each group of tensors, dense or by codes as the summation has it.

    Attributes:
        chosen: the elements.
        values: shape (chosen.size,): what this worker gives, then the mean; tensors of one group
            of consecutive layers lie there as in the arena.
        summation: how they are summed; this exchange's own, for what it keeps from one time to the
            next belongs to these elements.
        algorithm, reason: how the largest block is summed, and why so.
    """

    def __init__(
        self,
        comm: Communicator,
        chosen: Selection,
        summation: Summation,
        like: Array,
        never_used: Callable[[], Set[str]] = frozenset,
    ) -> None:
        """Bind it; collective over ``comm``, the workers.

        Args:
            comm: the workers.
            chosen: the elements.
            summation: how they are summed.
            like: array of the type of ``values``.
            never_used: names of the tensors that this worker has never had a use for, which codes
                without a 0 would move all the same.
        """
        self.chosen = chosen
        self.summation = summation
        self.values = np.zeros(chosen.size, like.dtype)
        self.algorithm, self.reason = "none", "a single worker"
        self._workers = comm.size
        self._comm = comm
        self._never_used = never_used
        #: Whether a worker has used each tensor, and the request that asks for it.
        self._used: tuple[Array, Any] | None = None
        self._sums: list[Sum] = []
        self._left: list[Sum] = []
        self._is_under_way = False
        start, largest = 0, 0
        for group, tensors in chosen.blocks.items():
            sizes = [tensor.stop - tensor.start for tensor in tensors]
            stop = start + sum(sizes)
            own = self.values[start:stop]
            ends = np.cumsum([0, *sizes]).tolist()
            views = {
                tensor.name: own[low:high].reshape(tensor.shape)
                for tensor, low, high in zip(tensors, ends, ends[1:])
            }
            if comm.size > 1 or summation.acts_alone:
                bucket = Bucket(tensors[0].start, tensors[0].start + sum(sizes), frozenset(), group)
                self._sums.append(summation.bind(Summand(bucket, comm, own, views, own)))
                if stop - start > largest:
                    largest = stop - start
                    self.algorithm, self.reason = self._sums[-1].algorithm, self._sums[-1].reason
            start = stop

    def start(self, step: int) -> None:
        """Begin, from what ``values`` holds; all workers start their exchanges in one order."""
        if self._workers > 1:
            # Each gives its part of the mean, as of a gradient: what codes leave out adds up.
            self.values /= self._workers
        self.summation.begin(step, 1.0)
        self.summation.prepare(self.values, self._workers)
        if not isinstance(self.summation, Dense):
            never = self._never_used()
            used = np.array([tensor.name not in never for tensor in self._tensors()], np.uint8)
            asked = self._comm.Iallreduce(MPI.IN_PLACE, used, op=MPI.MAX)
            self._used = used, asked
        for one in self._sums:
            one.Start()
        self._left = list(self._sums)
        self._is_under_way = True

    def test(self) -> bool:
        """Move it along; true once the mean is in ``values``."""
        if self._is_under_way:
            self._left = [one for one in self._left if not one.Test()]
            if self._used and not self._used[1].Test():
                return False
            if not self._left:
                self._leave_alone()
                self.summation.commit()
                self._is_under_way = False
        return not self._is_under_way

    def _tensors(self) -> list[Tensor]:
        """In their order in ``values``."""
        return [tensor for block in self.chosen.blocks.values() for tensor in block]

    def _leave_alone(self) -> None:
        """Clear the mean of tensors that no worker has used."""
        if self._used is None:
            return
        (used, _), self._used, start = self._used, None, 0
        for tensor, is_used in zip(self._tensors(), used, strict=True):
            stop = start + tensor.stop - tensor.start
            if not is_used:
                self.values[start:stop] = 0
            start = stop

    def wait(self, others: "Iterable[Exchange]" = ()) -> None:
        """Complete it, and move ``others`` along meanwhile, for whose messages others may wait."""
        while not self.test():
            for other in others:
                other.test()
            give_way()

    def close(self) -> None:
        """Free what is bound to the communicator; collective."""
        while self._sums:
            self._sums.pop().Free()
