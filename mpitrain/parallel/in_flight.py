"""Sums of buckets that are under way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

from collectives import CorruptMessage
from collectives.execution.waiting import give_way
from mpitrain.parallel.arena import Bucket
from mpitrain.parallel.summation import Sum, arrived


class _StartedSum(NamedTuple):
    bucket: Bucket
    its_sum: Sum
    complete: Callable[[], None]


class SumsInFlight:
    """Sums that were started and are not complete.

    MPI moves long messages only inside its calls: call :meth:`progress` as often as is cheap.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """``buckets``: the numbering of buckets in errors."""
        self._buckets = buckets
        self._started: list[_StartedSum] = []
        self._seconds = 0.0

    def start(
        self, bucket: Bucket, its_sum: Sum, complete: Callable[[], None] = lambda: None
    ) -> None:
        """Start a sum, in the same order on all ranks; ``complete`` is called at its end.

        Several sums of one bucket end in the order in which they were started.
        """
        with self.timed():
            its_sum.Start()
        self._started.append(_StartedSum(bucket, its_sum, complete))

    def progress(self) -> None:
        """Move all sums along without waiting."""
        if self._started:
            with self.timed():
                self._move(lambda its_sum: its_sum.Test())

    def wait(self) -> float:
        """Complete all sums.

        Returns:
            Seconds that this rank spent in communication since the last call.

        Raises:
            CorruptMessage: a message arrived changed, where messages carry checksums; the error
                names the bucket.
        """
        with self.timed():
            # In turns: buckets may be on different communicators, whose ranks wait for one another.
            while self._started:
                self._move(arrived)
                if self._started:
                    give_way()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of a block as communication."""
        start = perf_counter()
        yield
        self._seconds += perf_counter() - start

    def _move(self, is_done: Callable[[Sum], bool]) -> None:
        left: list[_StartedSum] = []
        late: set[int] = set()  # buckets with a sum that is not complete
        for one in self._started:
            if id(one.bucket) in late:
                left.append(one)
                continue
            try:
                done = is_done(one.its_sum)
            except CorruptMessage as error:
                number, layers = self._buckets.index(one.bucket), one.bucket.layers
                raise CorruptMessage(
                    f"bucket {number}, layers {min(layers)} to {max(layers)}: {error}"
                ) from error
            if done:
                one.complete()
            else:
                left.append(one)
                late.add(id(one.bucket))
        self._started = left
