"""Several plans and requests at once."""

from collections.abc import Iterable
from typing import Protocol

from collectives.calls.engine import Engine


class Startable(Protocol):
    """A persistent plan, or a persistent request of mpi4py's."""

    def Start(self) -> None:
        """Starts a run."""


class Testable(Protocol):
    """A plan, or a request of mpi4py's."""

    def Test(self) -> bool:
        """Makes progress; returns whether it has completed."""


class Requests:
    """What ``MPI.Prequest.Startall`` and ``MPI.Request.Waitall`` are for requests alone: MPI knows
    nothing of plans, and would not move them along."""

    _engine: Engine

    def Startall(self, plans: Iterable[Startable]) -> None:
        """Starts persistent plans, and mpi4py's persistent requests, in this order, the same on all
        ranks."""
        for plan in plans:
            plan.Start()

    def Testall(self, requests: Iterable[Testable]) -> bool:
        """Moves plans and mpi4py's requests along; returns whether all have completed."""
        return all([request.Test() for request in requests])

    def Waitall(self, requests: Iterable[Testable]) -> None:
        """Completes plans and mpi4py's requests, in whatever order they end; all plans that this
        thread has started go on meanwhile."""
        left = list(requests)
        with self._engine.waiting("Waitall", by_all=False):
            while not self.Testall(left):
                self._engine.underway.progress()
