"""The arguments of a collective call, and back to those of mpi4py's method."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

#: Names of mpi4py's blocking methods; those of v-variants end in ``v``.
_METHODS = {
    "allreduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter_block",
    "allgather": "Allgather",
    "alltoall": "Alltoall",
    "broadcast": "Bcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "scan": "Scan",
    "exscan": "Exscan",
    "barrier": "Barrier",
}


def collective_of(method: str) -> str:
    """The collective of a method of mpi4py's, blocking."""
    names = {name: collective for collective, name in _METHODS.items()}
    return names.get(method) or names.get(method.removesuffix("v")) or names[f"{method}_block"]


class Arguments(NamedTuple):
    """A call as the caller made it, with mpi4py's buffer specifications.

    Attributes:
        vector: whether it is a v-variant, whose blocks may differ in length.
        recvcounts: counts of ``Reduce_scatter``; ``None`` if each rank's buffer says its own.
    """

    collective: str
    sendbuf: Any
    recvbuf: Any
    op: MPI.Op | None = None
    root: int = 0
    vector: bool = False
    recvcounts: Sequence[int] | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the input lies where the result goes."""
        return self.sendbuf is None or self.sendbuf is MPI.IN_PLACE

    @property
    def method(self) -> str:
        """Name of mpi4py's blocking method."""
        name = _METHODS[self.collective]
        if self.vector or self.recvcounts is not None:
            return "Reduce_scatter" if self.collective == "reduce_scatter" else f"{name}v"
        return name

    @property
    def for_mpi4py(self) -> tuple[Any, ...]:
        """The arguments of that method, in its order."""
        collective, sendbuf, recvbuf, op, root, vector, recvcounts = self
        if collective == "barrier":
            return ()
        if collective == "broadcast":
            return recvbuf, root
        if collective == "scatter":
            return sendbuf, MPI.IN_PLACE if recvbuf is None else recvbuf, root
        given = (MPI.IN_PLACE if sendbuf is None else sendbuf, recvbuf)
        if collective == "reduce_scatter" and (vector or recvcounts is not None):
            return (*given, recvcounts, op)
        if collective == "gather":
            return (*given, root)
        if collective == "reduce":
            return (*given, op, root)
        return given if op is None else (*given, op)
