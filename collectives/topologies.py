"""Communicators with a topology of MPI's: Cartesian, graph, distributed graph."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from mpi4py import MPI

from collectives.calls.engine import Engine
from collectives.communicator import Communicator


class _Neighbours:
    """The neighbourhood collectives: mpi4py's, once the plans that are under way have ended."""

    _engine: Engine

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        with self._after_plans():
            super().Neighbor_allgather(sendbuf, recvbuf)  # type: ignore[misc]

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        with self._after_plans():
            super().Neighbor_allgatherv(sendbuf, recvbuf)  # type: ignore[misc]

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        with self._after_plans():
            super().Neighbor_alltoall(sendbuf, recvbuf)  # type: ignore[misc]

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        with self._after_plans():
            super().Neighbor_alltoallv(sendbuf, recvbuf)  # type: ignore[misc]

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        with self._after_plans():
            super().Neighbor_alltoallw(sendbuf, recvbuf)  # type: ignore[misc]

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        with self._after_plans():
            return super().neighbor_allgather(sendobj)  # type: ignore[misc]

    def neighbor_alltoall(self, sendobj: list[Any]) -> list[Any]:
        with self._after_plans():
            return super().neighbor_alltoall(sendobj)  # type: ignore[misc]

    def _after_plans(self) -> AbstractContextManager[None]:
        return self._engine.after_plans("a neighbourhood collective")


class Cartesian(_Neighbours, MPI.Cartcomm, Communicator):  # type: ignore[misc]
    """A grid of ranks."""

    __new__ = Communicator.__new__  # type: ignore[assignment]

    def Sub(self, remain_dims: Sequence[bool]) -> Self:
        """The grids that keep these dimensions; a :class:`Cartesian`, too."""
        with self._engine.after_plans("sub"):
            return self._like(super().Sub(remain_dims))


class Graph(_Neighbours, MPI.Graphcomm, Communicator):  # type: ignore[misc]
    """Ranks with edges that all ranks know."""

    __new__ = Communicator.__new__  # type: ignore[assignment]


class DistributedGraph(_Neighbours, MPI.Distgraphcomm, Communicator):  # type: ignore[misc]
    """Ranks with edges, each of which knows its own."""

    __new__ = Communicator.__new__  # type: ignore[assignment]


_KINDS = {
    MPI.Cartcomm: Cartesian,
    MPI.Graphcomm: Graph,
    MPI.Distgraphcomm: DistributedGraph,
    MPI.Intracomm: None,
}


def class_for(cls: type[Communicator], comm: MPI.Intracomm) -> type[Communicator]:
    """The class of a communicator on ``comm``: ``cls``, with the methods of its topology.

    As mpi4py's class says: under Open MPI 5.0.11, what ``Create`` makes of a grid calls itself one.
    """
    kind = _KINDS[mpi_class(type(comm))] if comm != MPI.COMM_NULL else None
    plain: type[Communicator] = next(
        c for c in cls.__mro__ if issubclass(c, Communicator) and not issubclass(c, MPI.Topocomm)
    )
    if kind is None:
        return plain
    if plain is Communicator:
        return kind
    if issubclass(cls, kind):
        return cls
    return type(plain.__name__, (kind, plain), {"__module__": plain.__module__})


def mpi_class(cls: type[MPI.Comm]) -> type[MPI.Intracomm]:
    """mpi4py's class with as many methods."""
    return next((base for base in _KINDS if issubclass(cls, base)), MPI.Intracomm)
