"""The methods that make communicators of one; those have its settings."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from mpi4py import MPI

from collectives.calls.engine import Engine
from collectives.calls.methods.objects import after_plans
from collectives.errors import CollectiveError


def made(method: Callable[..., Any], by_all: bool = True) -> Callable[..., Any]:
    """mpi4py's method, whose communicator gets the settings of this one."""
    return after_plans(method, by_all=by_all, end=lambda self, comm: self._like(comm))


class Constructors(MPI.Intracomm):
    """MPI's; plans of the communicator that are under way are ended first."""

    _engine: Engine

    Clone = made(MPI.Intracomm.Clone)
    Dup = made(MPI.Intracomm.Dup)
    Dup_with_info = made(MPI.Intracomm.Dup_with_info)
    Create = made(MPI.Intracomm.Create)
    Split = made(MPI.Intracomm.Split)
    Split_type = made(MPI.Intracomm.Split_type)
    Create_cart = made(MPI.Intracomm.Create_cart)
    Create_graph = made(MPI.Intracomm.Create_graph)
    Create_group = made(MPI.Intracomm.Create_group, by_all=False)
    Shrink = made(MPI.Intracomm.Shrink, by_all=False)

    def Idup(self, info: MPI.Info | None = None) -> tuple[Self, MPI.Request]:
        """Usable once its request is complete.

        Raises:
            CollectiveError: this one has a timeout; use :meth:`Dup`.
        """
        return self._duplicate(super().Idup, info)

    def Idup_with_info(self, info: MPI.Info) -> tuple[Self, MPI.Request]:
        return self._duplicate(super().Idup_with_info, info)

    def Create_dist_graph(self, *given: Any, **named: Any) -> MPI.Distgraphcomm:
        with self._engine.after_plans("create_dist_graph"), self._bare() as bare:
            return self._like(bare.Create_dist_graph(*given, **named))

    def Create_dist_graph_adjacent(self, *given: Any, **named: Any) -> MPI.Distgraphcomm:
        with self._engine.after_plans("create_dist_graph_adjacent"), self._bare() as bare:
            return self._like(bare.Create_dist_graph_adjacent(*given, **named))

    @contextmanager
    def _bare(self) -> Iterator[MPI.Intracomm]:
        """The ranks without their topology: Open MPI 5.0.11 takes a distributed graph that is made
        of a grid or a graph for one of those."""
        if not self.is_topo:
            yield MPI.Intracomm(self)
            return
        bare = MPI.Intracomm(super().Split(0, self.rank))
        try:
            yield bare
        finally:
            bare.Free()

    def _like(self, comm: MPI.Comm) -> Any:
        """``comm`` with this communicator's settings."""
        if comm == MPI.COMM_NULL:
            return comm  # as mpi4py: the rank is in no group
        ours = type(self)(comm, *self._engine.resources.handed_on)  # type: ignore[call-arg]
        ours._engine.set_traffic(self._engine.progress.traffic)
        return ours

    def _duplicate(
        self, duplicate: Callable[..., tuple[Self, MPI.Request]], *info: MPI.Info | None
    ) -> tuple[Self, MPI.Request]:
        """One that comes to life later, when its request is complete."""
        if self._engine.settings.timeout:
            raise CollectiveError(
                "a communicator with a timeout has a watchdog, which all ranks start together; use "
                "Dup in the place of Idup"
            )
        comm, request = duplicate(*info)
        comm._engine = Engine(comm, self._engine.resources.handed_on)
        comm._engine.set_traffic(self._engine.progress.traffic)
        return comm, request
