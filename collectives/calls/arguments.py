"""What a collective is called with: for each of MPI's, which buffers, counts and root it has.

The blocking, the nonblocking and the persistent method of a collective take the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

#: The buffer of a barrier.
NOTHING = np.empty(0, np.uint8)


class Arguments(NamedTuple):
    """A call as the caller made it, with mpi4py's buffer specifications.

    Attributes:
        vector: the v-variant, whose blocks have lengths of their own.
        recvcounts: of ``Reduce_scatter``; ``None`` if each rank's is what its buffer holds.
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


def allreduce(sendbuf: Any, recvbuf: Any, op: MPI.Op) -> Arguments:
    return Arguments("allreduce", sendbuf, recvbuf, op)


def reduce_scatter_block(sendbuf: Any, recvbuf: Any, op: MPI.Op) -> Arguments:
    return Arguments("reduce_scatter", sendbuf, recvbuf, op)


def reduce_scatter(
    sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None, op: MPI.Op
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


def bcast(buf: Any, root: int) -> Arguments:
    return Arguments("broadcast", MPI.IN_PLACE, buf, root=root)


def reduce(sendbuf: Any, recvbuf: Any, op: MPI.Op, root: int) -> Arguments:
    return Arguments("reduce", sendbuf, recvbuf, op, root)


def gather(sendbuf: Any, recvbuf: Any, root: int) -> Arguments:
    return Arguments("gather", sendbuf, recvbuf, root=root)


def gatherv(sendbuf: Any, recvbuf: Any, root: int) -> Arguments:
    return Arguments("gather", sendbuf, recvbuf, root=root, vector=True)


def scatter(sendbuf: Any, recvbuf: Any, root: int) -> Arguments:
    return Arguments("scatter", sendbuf, recvbuf, root=root)


def scatterv(sendbuf: Any, recvbuf: Any, root: int) -> Arguments:
    return Arguments("scatter", sendbuf, recvbuf, root=root, vector=True)


def scan(sendbuf: Any, recvbuf: Any, op: MPI.Op) -> Arguments:
    return Arguments("scan", sendbuf, recvbuf, op)


def exscan(sendbuf: Any, recvbuf: Any, op: MPI.Op) -> Arguments:
    return Arguments("exscan", sendbuf, recvbuf, op)


def barrier() -> Arguments:
    """The reduction of a byte that nobody looks at."""
    return Arguments("barrier", np.zeros(1, np.uint8), np.zeros(1, np.uint8), MPI.BOR)
