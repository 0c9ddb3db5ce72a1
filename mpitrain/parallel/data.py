"""Data parallelism: the sum of gradients over ranks, overlapped with the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from mpi4py import MPI

from collectives import Communicator
from collectives.communicator import AnyPlan
from mpitrain.arena import Arena


class GradientReducer:
    """Sums an arena's gradients over the ranks of ``comm``, in place, bucket by bucket.

    One plan a bucket is bound here and used in every step.  In a step, call :meth:`ready` after
    each layer of the backward pass, :meth:`progress` as often as is cheap (MPI moves long messages
    only inside its calls), and :meth:`wait` before the gradients are read.  The result is bitwise
    the same on every rank.  On one rank nothing is bound and nothing is done.

    Attributes:
        algorithm: name of the all-reduce in use, for the largest bucket.
        reason: why it was chosen.
    """

    def __init__(
        self,
        comm: Communicator,
        arena: Arena,
        *,
        algorithm: str = "auto",
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
    ) -> None:
        """Bind the plans; collective over ``comm``.

        Args:
            comm: the ranks that hold replicas of ``arena``.
            arena: its ``gradients`` are reduced.
            algorithm: as ``comm.Allreduce_init`` takes it.
            bucket_bytes: least size of a bucket.
            overlap: start buckets as they become ready rather than all of them at the end.

        Raises:
            collectives.UnknownAlgorithm: there is no such algorithm or option.
        """
        self._overlap = overlap
        self._buckets = arena.buckets(bucket_bytes) if comm.size > 1 else []
        self._plans = [
            comm.Allreduce_init(
                MPI.IN_PLACE,
                arena.gradients[bucket.start : bucket.stop],
                op=MPI.SUM,
                algorithm=algorithm,
            )
            for bucket in self._buckets
        ]
        self._started = 0
        self._in_flight: list[AnyPlan] = []
        self._seconds = 0.0
        self.algorithm = "none"
        self.reason = "a single rank"
        if self._plans:
            sizes = [bucket.stop - bucket.start for bucket in self._buckets]
            largest = self._plans[sizes.index(max(sizes))]
            self.algorithm = largest.algorithm
            self.reason = largest.reason

    def ready(self, layer: int) -> None:
        """The gradients of ``layer`` and of all layers above it are written."""
        if self._overlap:
            self._start_down_to(layer)

    def progress(self) -> None:
        """Move every bucket in flight along, without waiting for any."""
        with self._timed():
            self._in_flight = [plan for plan in self._in_flight if not plan.Test()]

    def wait(self) -> float:
        """Finish the step: all gradients are sums over the ranks now.

        Returns:
            Seconds that this rank spent in communication in this step, here and in the methods
            above.
        """
        self._start_down_to(0)
        with self._timed():
            for plan in self._in_flight:
                plan.Wait()
        seconds = self._seconds
        self._started = 0
        self._in_flight = []
        self._seconds = 0.0
        return seconds

    def close(self) -> None:
        """Free the plans; collective, and the reducer cannot be used after it."""
        while self._plans:
            self._plans.pop().Free()

    def _start_down_to(self, layer: int) -> None:
        with self._timed():
            for bucket, plan in zip(
                self._buckets[self._started :], self._plans[self._started :], strict=True
            ):
                if bucket.first_layer < layer:
                    return
                plan.Start()
                self._in_flight.append(plan)
                self._started += 1

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self._seconds += perf_counter() - start
