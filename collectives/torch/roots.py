"""Ranks that name different roots, found without a message of its own."""

from array import array
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from collectives.errors import MismatchError


class Roots:
    """Digest of the roots of a group's calls; the ranks compare it where they meet anyway.

    Ranks that each take themselves for the root of a broadcast wait for nobody, and get the wrong
    numbers.  Calls add to it, and compare it, in the order in which they run.

    Args:
        record: makes and records a call of a name.
    """

    def __init__(self, record: Callable[..., None]) -> None:
        self._record = record
        self._digest = 0
        self._least = self.told()
        self._buffer = [self._least, MPI.INT64_T]  # as MPI takes it in the least time

    def record(self, what: tuple[Any, ...], call: Callable[..., None], given: Any) -> None:
        """Makes and records a call whose name ends with its root."""
        self._digest = hash((self._digest, what[-1]))  # a hash of numbers is every rank's
        self._record(what, call, given)

    def meet(self, comm: MPI.Intracomm) -> None:
        """A barrier that compares.  Collective.

        Raises:
            MismatchError: on all ranks.
        """
        least, digest = self._least, self._digest
        least[0], least[1] = digest, ~digest
        MPI.Intracomm.Allreduce(comm, MPI.IN_PLACE, self._buffer, MPI.MIN)
        self.check(least)

    def told(self, *more: int) -> "array[int]":
        """The digest as a minimum over the ranks compares it, with more numbers behind it."""
        return array("q", (self._digest, ~self._digest, *more))

    def check(self, least: "array[int]") -> None:
        """Compares by the minimum of what the ranks brought.

        Raises:
            MismatchError: on all ranks.
        """
        if least[0] != ~least[1]:
            raise MismatchError(
                "a broadcast, reduce, gather or scatter of this group had other roots on some "
                "ranks, so its numbers are wrong, and those of later calls may be; go on with a "
                "new group; COLLECTIVES_CHECK=1 names the call"
            )
