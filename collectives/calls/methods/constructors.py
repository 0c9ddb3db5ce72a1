"""The methods that make communicators of one; those have its settings."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from mpi4py import MPI

from collectives.calls.engine import Engine
from collectives.errors import CollectiveError


class Constructors(MPI.Intracomm):
    """MPI's; plans of the communicator that are under way are ended first."""

    _engine: Engine

    def Clone(self) -> Self:
        with self._engine.after_plans("clone"):
            return self._like(super().Clone())

    def Dup(self, info: MPI.Info | None = None) -> Self:
        with self._engine.after_plans("dup"):
            return self._like(super().Dup(info))

    def Dup_with_info(self, info: MPI.Info) -> Self:
        with self._engine.after_plans("dup_with_info"):
            return self._like(super().Dup_with_info(info))

    def Idup(self, info: MPI.Info | None = None) -> tuple[Self, MPI.Request]:
        """Usable once its request is complete.

        Raises:
            CollectiveError: this one has a timeout; use :meth:`Dup`.
        """
        return self._duplicate(super().Idup, info)

    def Idup_with_info(self, info: MPI.Info) -> tuple[Self, MPI.Request]:
        """As :meth:`Idup`."""
        return self._duplicate(super().Idup_with_info, info)

    def Create(self, group: MPI.Group) -> Self:
        with self._engine.after_plans("create"):
            return self._like(super().Create(group))

    def Split(self, color: int = 0, key: int = 0) -> Self:
        with self._engine.after_plans("split"):
            return self._like(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Self:
        with self._engine.after_plans("split_type"):
            return self._like(super().Split_type(split_type, key, info))

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> MPI.Cartcomm:
        with self._engine.after_plans("create_cart"):
            return self._like(super().Create_cart(dims, periods, reorder))

    def Create_graph(
        self, index: Sequence[int], edges: Sequence[int], reorder: bool = False
    ) -> MPI.Graphcomm:
        with self._engine.after_plans("create_graph"):
            return self._like(super().Create_graph(index, edges, reorder))

    def Create_dist_graph(self, *given: Any, **named: Any) -> MPI.Distgraphcomm:
        """Arguments as mpi4py's."""
        with self._engine.after_plans("create_dist_graph"), self._bare() as bare:
            return self._like(bare.Create_dist_graph(*given, **named))

    def Create_dist_graph_adjacent(self, *given: Any, **named: Any) -> MPI.Distgraphcomm:
        """Arguments as mpi4py's."""
        with self._engine.after_plans("create_dist_graph_adjacent"), self._bare() as bare:
            return self._like(bare.Create_dist_graph_adjacent(*given, **named))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Self:
        with self._engine.waiting("create_group", by_all=False):
            return self._like(super().Create_group(group, tag))

    def Shrink(self) -> Self:
        with self._engine.waiting("shrink", by_all=False):
            return self._like(super().Shrink())

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
        ours._engine.count(self._engine.progress.traffic)
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
        comm._engine.count(self._engine.progress.traffic)
        return comm, request
