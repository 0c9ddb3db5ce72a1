"""Communicators with a topology of MPI's: Cartesian, graph, distributed graph."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Self

from mpi4py import MPI

from collectives.calls.engine import Engine
from collectives.communicator import Communicator


class _Neighbours:
    """mpi4py's neighbourhood collectives, called after all running plans have ended."""

    _engine: Engine


def _after_plans(name: str) -> Callable[..., Any]:
    """The method ``name`` of mpi4py, behind the plans of the communicator."""

    @wraps(getattr(MPI.Topocomm, name))
    def method(self: _Neighbours, *args: Any, **kwargs: Any) -> Any:
        with self._engine.after_plans("a neighbourhood collective"):
            return getattr(super(_Neighbours, self), name)(*args, **kwargs)

    return method


for _name in (
    "Neighbor_allgather", "Neighbor_allgatherv", "Neighbor_alltoall", "Neighbor_alltoallv",
    "Neighbor_alltoallw", "neighbor_allgather", "neighbor_alltoall",
):  # fmt: skip
    setattr(_Neighbours, _name, _after_plans(_name))


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
    """Ranks with edges; each rank knows its own edges."""

    __new__ = Communicator.__new__  # type: ignore[assignment]


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
    """The class of mpi4py whose methods ``cls`` has."""
    return next((base for base in _KINDS if issubclass(cls, base)), MPI.Intracomm)
