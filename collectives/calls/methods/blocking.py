"""The blocking collectives, by MPI's names."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.calls import arguments
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
        self._engine.run(arguments.allreduce(sendbuf, recvbuf, op), algorithm)

    def Reduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Reduces block j of every rank's ``sendbuf`` into rank j's ``recvbuf``."""
        self._engine.run(arguments.reduce_scatter_block(sendbuf, recvbuf, op), algorithm)

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
        self._engine.run(arguments.reduce_scatter(sendbuf, recvbuf, recvcounts, op), algorithm)

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
        self._engine.run(arguments.allgather(sendbuf, recvbuf), algorithm)

    def Allgatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of unequal length."""
        self._engine.run(arguments.allgatherv(sendbuf, recvbuf), algorithm)

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
        self._engine.run(arguments.alltoall(sendbuf, recvbuf), algorithm)

    def Alltoallv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of unequal length."""
        self._engine.run(arguments.alltoallv(sendbuf, recvbuf), algorithm)

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
        self._engine.run(arguments.bcast(buf, root), algorithm)

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
        self._engine.run(arguments.reduce(sendbuf, recvbuf, op, root), algorithm)

    def Gather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Gathers every rank's ``sendbuf`` into ``recvbuf`` of rank ``root``."""
        self._engine.run(arguments.gather(sendbuf, recvbuf, root), algorithm)

    def Gatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of unequal length."""
        self._engine.run(arguments.gatherv(sendbuf, recvbuf, root), algorithm)

    def Scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Sends block j of ``sendbuf`` of rank ``root`` to rank j's ``recvbuf``."""
        self._engine.run(arguments.scatter(sendbuf, recvbuf, root), algorithm)

    def Scatterv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """The same with blocks of unequal length."""
        self._engine.run(arguments.scatterv(sendbuf, recvbuf, root), algorithm)

    def Scan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Reduces ``sendbuf`` over the ranks up to this one into ``recvbuf``."""
        self._engine.run(arguments.scan(sendbuf, recvbuf, op), algorithm)

    def Exscan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Reduces ``sendbuf`` over the ranks before this one; rank 0's ``recvbuf`` stays."""
        self._engine.run(arguments.exscan(sendbuf, recvbuf, op), algorithm)

    def Barrier(
        self,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        """Returns when every rank has called it."""
        self._engine.run(arguments.barrier(), algorithm)
