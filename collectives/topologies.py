"""Communicators with a topology of MPI's: Cartesian, graph, distributed graph."""

from typing import Any

from mpi4py import MPI

from collectives.calls.methods.constructors import made
from collectives.calls.methods.objects import after_plans
from collectives.communicator import Communicator

_NEIGHBOURHOOD = "a neighbourhood collective"


class _Neighbours:
    """mpi4py's neighbourhood collectives, once the plans that are under way have ended."""

    __new__: Any = Communicator.__new__
    Neighbor_allgather = after_plans(MPI.Topocomm.Neighbor_allgather, _NEIGHBOURHOOD)
    Neighbor_allgatherv = after_plans(MPI.Topocomm.Neighbor_allgatherv, _NEIGHBOURHOOD)
    Neighbor_alltoall = after_plans(MPI.Topocomm.Neighbor_alltoall, _NEIGHBOURHOOD)
    Neighbor_alltoallv = after_plans(MPI.Topocomm.Neighbor_alltoallv, _NEIGHBOURHOOD)
    Neighbor_alltoallw = after_plans(MPI.Topocomm.Neighbor_alltoallw, _NEIGHBOURHOOD)
    neighbor_allgather = after_plans(MPI.Topocomm.neighbor_allgather, _NEIGHBOURHOOD)
    neighbor_alltoall = after_plans(MPI.Topocomm.neighbor_alltoall, _NEIGHBOURHOOD)


class Cartesian(_Neighbours, MPI.Cartcomm, Communicator):  # type: ignore[misc]
    """A grid of ranks."""

    Sub = made(MPI.Cartcomm.Sub)


class Graph(_Neighbours, MPI.Graphcomm, Communicator):  # type: ignore[misc]
    """Ranks with edges that all ranks know."""


class DistributedGraph(_Neighbours, MPI.Distgraphcomm, Communicator):  # type: ignore[misc]
    """Ranks with edges; each rank knows its own edges."""


_KINDS = {
    MPI.Cartcomm: Cartesian,
    MPI.Graphcomm: Graph,
    MPI.Distgraphcomm: DistributedGraph,
    MPI.Intracomm: None,
}


def class_for(cls: type[Communicator], comm: MPI.Intracomm) -> type[Communicator]:
    """The class of a communicator on ``comm``: ``cls``, with the methods of its topology.

    mpi4py's class decides: under Open MPI 5.0.11, the group that ``Create`` makes of a grid claims
    to be a grid.
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
    """The class of mpi4py for the same kind of communicator."""
    return next((base for base in _KINDS if issubclass(cls, base)), MPI.Intracomm)
