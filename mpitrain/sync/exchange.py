"""Means of all tensors over the workers, computed while training goes on."""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import give_way
from mpitrain.arrays import Array
from mpitrain.parallel.arena import Bucket
from mpitrain.parallel.summation import Dense, Sum, Summand, Summation
from mpitrain.sync.workers import Workers


class Exchange:
    """The mean over the workers of all elements; can be started any number of times.

    Cost: an all-reduce for each run of tensors of one group, dense or with a codec.

    Attributes:
        values: flat array in the arena's layout with this worker's values, then the mean.
        summation: dense or with a codec.  No other exchange shares it, because it may keep
            residuals of these elements.
        algorithm, reason: how the largest run is summed, and why so.
    """

    def __init__(self, workers: Workers, summation: Summation) -> None:
        """Set up the sums; collective over the workers."""
        comm = self._comm = workers.comm
        self.summation = summation
        self.values = np.zeros(workers.arena.size, workers.parameters.dtype)
        self.algorithm, self.reason = "none", "a single worker"
        self._tensors = workers.arena.tensors
        #: Tensors that this worker has never used.  They must stay as they are, but a codec that
        #: cannot code a 0 would change them.
        self._never_used = workers.never_used
        #: For each tensor, whether any worker has used it; and the request of that all-reduce.
        self._used: tuple[Array, Any] | None = None
        self._sums: list[Sum] = []
        self._left: list[Sum] = []
        self._is_under_way = False
        most = 0
        for group, run in groupby(self._tensors, attrgetter("group")):
            tensors = list(run)
            bucket = Bucket(tensors[0].start, tensors[-1].stop, frozenset(), group)
            own = self.values[bucket.start : bucket.stop]
            if comm.size > 1 or summation.acts_alone:
                views = workers.arena.inside(bucket, own)
                self._sums.append(summation.bind(Summand(bucket, comm, own, views, own)))
                if own.size >= most:
                    most = own.size
                    self.algorithm, self.reason = self._sums[-1].algorithm, self._sums[-1].reason

    def start(self, step: int) -> None:
        """Start the mean of ``values``; all workers start their exchanges in the same order."""
        workers = self._comm.size
        if workers > 1:  # as with gradients, so that residuals of codecs add up
            self.values /= workers
        self.summation.begin(step, 1.0)
        if self.summation.needs_all:
            self.summation.prepare(self.values, workers)
        if not isinstance(self.summation, Dense):
            never = self._never_used()
            used = np.array([tensor.name not in never for tensor in self._tensors], np.uint8)
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
        (used, _), self._used = self._used, None
        for tensor, is_used in zip(self._tensors, used, strict=True):
            if not is_used:
                self.values[tensor.start : tensor.stop] = 0

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
