"""The blocking collectives, by MPI's names."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.calls.call import Arguments, barrier_arguments
from collectives.calls.engine import Engine


class Blocking:
    """Each returns when this rank's buffers are the caller's again."""

    _engine: Engine

    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Reduces ``sendbuf`` over all ranks into every rank's ``recvbuf``."""
        if algorithm is None and self._engine.leaves_to_native("allreduce", recvbuf):
            return super().Allreduce(sendbuf, recvbuf, op)  # type: ignore[misc]
        self._engine.run(Arguments("allreduce", sendbuf, recvbuf, op), algorithm)

    def Reduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Reduces block j of every rank's ``sendbuf`` into rank j's ``recvbuf``."""
        self._engine.run(Arguments("reduce_scatter", sendbuf, recvbuf, op), algorithm)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of ``recvcounts`` items; ``None``: as each rank's buffer holds."""
        self._engine.run(
            Arguments("reduce_scatter", sendbuf, recvbuf, op, 0, True, recvcounts), algorithm
        )

    def Allgather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Gathers every rank's ``sendbuf`` into every rank's ``recvbuf``, in rank order."""
        if algorithm is None and self._engine.leaves_to_native("allgather", recvbuf):
            return super().Allgather(sendbuf, recvbuf)  # type: ignore[misc]
        self._engine.run(Arguments("allgather", sendbuf, recvbuf), algorithm)

    def Allgatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of unequal length."""
        self._engine.run(Arguments("allgather", sendbuf, recvbuf, vector=True), algorithm)

    def Alltoall(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Sends block j of ``sendbuf`` to rank j, and receives its block into place j."""
        if algorithm is None and self._engine.leaves_to_native("alltoall", recvbuf):
            return super().Alltoall(sendbuf, recvbuf)  # type: ignore[misc]
        self._engine.run(Arguments("alltoall", sendbuf, recvbuf), algorithm)

    def Alltoallv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of unequal length."""
        self._engine.run(Arguments("alltoall", sendbuf, recvbuf, vector=True), algorithm)

    def Bcast(
        self,
        buf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Copies ``buf`` of rank ``root`` to every rank's."""
        if algorithm is None and self._engine.leaves_to_native("broadcast", buf):
            return super().Bcast(buf, root)  # type: ignore[misc]
        self._engine.run(Arguments("broadcast", MPI.IN_PLACE, buf, root=root), algorithm)

    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Reduces ``sendbuf`` over all ranks into ``recvbuf`` of rank ``root``."""
        self._engine.run(Arguments("reduce", sendbuf, recvbuf, op, root), algorithm)

    def Gather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Gathers every rank's ``sendbuf`` into ``recvbuf`` of rank ``root``."""
        self._engine.run(Arguments("gather", sendbuf, recvbuf, root=root), algorithm)

    def Gatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of unequal length."""
        self._engine.run(Arguments("gather", sendbuf, recvbuf, root=root, vector=True), algorithm)

    def Scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Sends block j of ``sendbuf`` of rank ``root`` to rank j's ``recvbuf``."""
        self._engine.run(Arguments("scatter", sendbuf, recvbuf, root=root), algorithm)

    def Scatterv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of unequal length."""
        self._engine.run(Arguments("scatter", sendbuf, recvbuf, root=root, vector=True), algorithm)

    def Scan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Reduces ``sendbuf`` over the ranks up to this one into ``recvbuf``."""
        self._engine.run(Arguments("scan", sendbuf, recvbuf, op), algorithm)

    def Exscan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Reduces ``sendbuf`` over the ranks before this one; rank 0's ``recvbuf`` stays."""
        self._engine.run(Arguments("exscan", sendbuf, recvbuf, op), algorithm)

    def Barrier(
        self,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Returns when every rank has called it."""
        self._engine.run(barrier_arguments(), algorithm)
