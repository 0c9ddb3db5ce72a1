"""Means of selected tensors over the workers, computed while training goes on."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import give_way
from mpitrain.arrays import Array
from mpitrain.parallel.arena import Bucket, Tensor
from mpitrain.parallel.summation import Dense, Sum, Summand, Summation
from mpitrain.sync.workers import Workers


class Selection:
    """Selected tensors of an arena, one after the other in a flat array.

    Tensors are sorted by group and keep the given order within a group.  Ranks that hold copies of
    a tensor therefore have it at the same position of equally long arrays, so that their sums round
    in the same way.

    Attributes:
        size: number of elements.
        tensors: the tensors, in their order in the flat array.
        runs: slices of the arena, each with the slice of the flat array that has its elements.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """``tensors``: in the order of the model, which is the same on all ranks."""
        self.tensors = sorted(tensors, key=lambda tensor: tensor.group)  # keeps the given order
        self.runs: list[tuple[slice, slice]] = []
        self.size = 0
        for tensor in self.tensors:
            start, at = tensor.start, self.size
            self.size += tensor.stop - tensor.start
            if self.runs and self.runs[-1][0].stop == start:
                there, here = self.runs.pop()  # which this one continues
                start, at = there.start, here.start
            self.runs.append((slice(start, tensor.stop), slice(at, self.size)))

    def take(self, flat: Array, into: Array | None = None) -> Array:
        """Copy the selected elements of ``flat``, in the arena's layout, to shape (size,).

        The result is ``into``, or a new array.
        """
        into = np.empty(self.size, flat.dtype) if into is None else into
        for there, here in self.runs:
            into[here] = flat[there]
        return into

    def put(self, values: Array, flat: Array) -> None:
        """Copy ``values``, shape (size,), to their positions in ``flat``, in the arena's layout."""
        for there, here in self.runs:
            flat[there] = values[here]


class Exchange:
    """The mean over the workers of a selection's elements; can be started any number of times.

    Cost: an all-reduce for each group of tensors, dense or with a codec.

    Attributes:
        chosen: the selected elements.
        values: this worker's values, then the mean, shape (chosen.size,).  Tensors of one group of
            consecutive layers lie there as in the arena.
        summation: dense or with a codec.  No other exchange shares it, because it may keep
            residuals of these elements.
        algorithm, reason: how the largest block is summed, and why so.
    """

    def __init__(self, workers: Workers, tensors: Iterable[Tensor], summation: Summation) -> None:
        """Set up the sums of the selected ``tensors``; collective over ``workers.comm``."""
        comm = self._comm = workers.comm
        chosen = self.chosen = Selection(tensors)
        self.summation = summation
        self.values = np.zeros(chosen.size, workers.parameters.dtype)
        self.algorithm, self.reason = "none", "a single worker"
        #: Tensors that this worker has never used.  They must stay as they are, but a codec that
        #: cannot code a 0 would change them.
        self._never_used = workers.never_used
        #: For each tensor, whether any worker has used it; and the request of that all-reduce.
        self._used: tuple[Array, Any] | None = None
        self._sums: list[Sum] = []
        self._left: list[Sum] = []
        self._is_under_way = False
        start, largest = 0, 0
        for group, members in groupby(chosen.tensors, lambda tensor: tensor.group):
            block = list(members)
            sizes = [tensor.stop - tensor.start for tensor in block]
            stop = start + sum(sizes)
            own = self.values[start:stop]
            ends = np.cumsum([0, *sizes]).tolist()
            views = {
                tensor.name: own[low:high].reshape(tensor.shape)
                for tensor, low, high in zip(block, ends, ends[1:])
            }
            if comm.size > 1 or summation.acts_alone:
                bucket = Bucket(block[0].start, block[0].start + sum(sizes), frozenset(), group)
                self._sums.append(summation.bind(Summand(bucket, comm, own, views, own)))
                if stop - start > largest:
                    largest = stop - start
                    self.algorithm, self.reason = self._sums[-1].algorithm, self._sums[-1].reason
            start = stop

    def start(self, step: int) -> None:
        """Start the mean of ``values``; all workers start their exchanges in the same order."""
        workers = self._comm.size
        if workers > 1:
            # As with gradients, each worker divides first, so that residuals of codecs add up.
            self.values /= workers
        self.summation.begin(step, 1.0)
        self.summation.prepare(self.values, workers)
        if not isinstance(self.summation, Dense):
            never = self._never_used()
            used = np.array([tensor.name not in never for tensor in self.chosen.tensors], np.uint8)
            asked = self._comm.Iallreduce(MPI.IN_PLACE, used, op=MPI.MAX)
            self._used = used, asked
        for one in self._sums:
            one.Start()
        self._left = list(self._sums)
        self._is_under_way = True

    def test(self) -> bool:
        """Progress the sums; true once the mean is in ``values``."""
        if self._is_under_way:
            self._left = [one for one in self._left if not one.Test()]
            if self._used and not self._used[1].Test():
                return False
            if not self._left:
                self._leave_alone()
                self.summation.commit()
                self._is_under_way = False
        return not self._is_under_way

    def _leave_alone(self) -> None:
        """Clear the mean of tensors that no worker has used."""
        if self._used is None:
            return
        (used, _), self._used, start = self._used, None, 0
        for tensor, is_used in zip(self.chosen.tensors, used, strict=True):
            stop = start + tensor.stop - tensor.start
            if not is_used:
                self.values[start:stop] = 0
            start = stop

    def wait(self, others: "Iterable[Exchange]" = ()) -> None:
        """Complete the mean; progress ``others`` meanwhile, as other workers may wait for them."""
        while not self.test():
            for other in others:
                other.test()
            give_way()

    def close(self) -> None:
        """Free the sums, which are bound to the communicator; collective."""
        while self._sums:
            self._sums.pop().Free()
