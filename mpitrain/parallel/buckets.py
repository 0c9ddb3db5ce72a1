"""Buckets of gradients on their way: started as soon as they are written, in the same order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

from collectives import CorruptMessage
from collectives.execution.waiting import give_way
from mpitrain.parallel.arena import Bucket
from mpitrain.parallel.summation import Sum, arrived


class BucketsInFlight:
    """Reduces each bucket once the gradients of all its layers are there.

    In a step, call :meth:`ready` after each layer of the last backward pass, :meth:`progress` as
    often as is cheap (MPI moves long messages only inside its calls), and :meth:`wait` before the
    gradients are read.  Buckets start in the order given, which must be the same on all ranks.
    """

    def __init__(
        self, buckets: Sequence[Bucket], sums: Mapping[Bucket, Sum], *, overlap: bool = True
    ) -> None:
        """Nothing is ready yet.

        Args:
            buckets: in the order in which they start.
            sums: the sum of each bucket; a bucket without one stays as it is.
            overlap: start buckets as they become ready rather than all of them at the end.
        """
        self._buckets = buckets
        self._sums = sums
        self.overlap = overlap
        self._ready: set[int] = set()
        self._started = 0
        self._in_flight: list[tuple[Bucket, Sum]] = []
        self._seconds = 0.0

    def ready(self, layer: int) -> None:
        """The gradients of ``layer`` are written."""
        self._ready.add(layer)
        if self.overlap:
            self._start()

    def progress(self) -> None:
        """Move every bucket in flight along, without waiting for any."""
        if self._in_flight:
            with self._timed():
                self._move(lambda its_sum: its_sum.Test())

    def wait(self) -> float:
        """Finish the step: all buckets are reduced now.

        Returns:
            Seconds that this rank spent in communication in this step, here and in the methods
            above.

        Raises:
            CorruptMessage: naming the bucket, where messages carry checksums.
        """
        self._ready |= {layer for bucket in self._buckets for layer in bucket.layers}
        self._start()
        with self._timed():
            # In turns: buckets may be on different communicators, whose ranks wait for one another.
            while self._in_flight:
                self._move(arrived)
                if self._in_flight:
                    give_way()
        seconds = self._seconds
        self._ready.clear()
        self._started = 0
        self._seconds = 0.0
        return seconds

    def _move(self, is_done: Callable[[Sum], bool]) -> None:
        left = []
        for bucket, its_sum in self._in_flight:
            try:
                if not is_done(its_sum):
                    left.append((bucket, its_sum))
            except CorruptMessage as error:
                number = self._buckets.index(bucket)
                layers = f"layers {min(bucket.layers)} to {max(bucket.layers)}"
                raise CorruptMessage(f"bucket {number}, {layers}: {error}") from error
        self._in_flight = left

    def _start(self) -> None:
        with self._timed():
            while self._started < len(self._buckets):
                bucket = self._buckets[self._started]
                if not bucket.layers <= self._ready:
                    return
                if bucket in self._sums:
                    self._sums[bucket].Start()
                    self._in_flight.append((bucket, self._sums[bucket]))
                self._started += 1

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self._seconds += perf_counter() - start
