"""The arguments of a collective call, from mpi4py's methods and back.

The blocking, the nonblocking and the persistent method of a collective take the same arguments:
those of the function here with its name in lower case.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
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
#: The buffer of a barrier.
NOTHING = np.empty(0, np.uint8)


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


def allreduce(sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Arguments:
    return Arguments("allreduce", sendbuf, recvbuf, op)


def reduce_scatter_block(sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Arguments:
    return Arguments("reduce_scatter", sendbuf, recvbuf, op)


def reduce_scatter(
    sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: MPI.Op = MPI.SUM
) -> Arguments:
    return Arguments("reduce_scatter", sendbuf, recvbuf, op, 0, True, recvcounts)


def allgather(sendbuf: Any, recvbuf: Any) -> Arguments:
    return Arguments("allgather", sendbuf, recvbuf)


def allgatherv(sendbuf: Any, recvbuf: Any) -> Arguments:
    return Arguments("allgather", sendbuf, recvbuf, vector=True)


def alltoall(sendbuf: Any, recvbuf: Any) -> Arguments:
    return Arguments("alltoall", sendbuf, recvbuf)


def alltoallv(sendbuf: Any, recvbuf: Any) -> Arguments:
    return Arguments("alltoall", sendbuf, recvbuf, vector=True)


def bcast(buf: Any, root: int = 0) -> Arguments:
    return Arguments("broadcast", MPI.IN_PLACE, buf, root=root)


def reduce(sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> Arguments:
    return Arguments("reduce", sendbuf, recvbuf, op, root)


def gather(sendbuf: Any, recvbuf: Any, root: int = 0) -> Arguments:
    return Arguments("gather", sendbuf, recvbuf, root=root)


def gatherv(sendbuf: Any, recvbuf: Any, root: int = 0) -> Arguments:
    return Arguments("gather", sendbuf, recvbuf, root=root, vector=True)


def scatter(sendbuf: Any, recvbuf: Any, root: int = 0) -> Arguments:
    return Arguments("scatter", sendbuf, recvbuf, root=root)


def scatterv(sendbuf: Any, recvbuf: Any, root: int = 0) -> Arguments:
    return Arguments("scatter", sendbuf, recvbuf, root=root, vector=True)


def scan(sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Arguments:
    return Arguments("scan", sendbuf, recvbuf, op)


def exscan(sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Arguments:
    return Arguments("exscan", sendbuf, recvbuf, op)


def barrier() -> Arguments:
    """The reduction of a byte that nobody looks at."""
    return Arguments("barrier", np.zeros(1, np.uint8), np.zeros(1, np.uint8), MPI.BOR)
