"""The mean over the workers of some tensors, on its way while the workers go on."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from collectives import Communicator
from collectives.execution.waiting import give_way
from mpitrain.arrays import Array
from mpitrain.parallel.arena import Bucket, Tensor
from mpitrain.parallel.summation import Sum, Summand, Summation


@dataclass(frozen=True)
class Run:
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
        self.runs: list[Run] = []
        self.size = 0
        for tensor in ordered:
            last = self.runs[-1] if self.runs else None
            if last and last.stop == tensor.start:
                self.runs[-1] = Run(last.start, tensor.stop, last.at)
            else:
                self.runs.append(Run(tensor.start, tensor.stop, self.size))
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
        chosen: whose elements.
        values: shape (chosen.size,): what this worker gives, then the mean; tensors of one group
            of consecutive layers lie there as in the arena.
        summation: how they are summed; this exchange's own, for what it keeps from one time to the
            next belongs to these elements.
        algorithm, reason: how the largest block is summed, and why so.
    """

    def __init__(
        self, comm: Communicator, chosen: Selection, summation: Summation, like: Array
    ) -> None:
        """Bind it; collective over ``comm``, the workers."""
        self.chosen = chosen
        self.summation = summation
        self.values = np.zeros(chosen.size, like.dtype)
        self.algorithm, self.reason = "none", "a single worker"
        self._workers = comm.size
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
        for one in self._sums:
            one.Start()
        self._left = list(self._sums)
        self._is_under_way = True

    def test(self) -> bool:
        """Move it along; true once the mean is in ``values``."""
        if self._is_under_way:
            self._left = [one for one in self._left if not one.Test()]
            if not self._left:
                self.summation.commit()
                self._is_under_way = False
        return not self._is_under_way

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
