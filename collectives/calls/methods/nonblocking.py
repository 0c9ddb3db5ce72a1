"""The nonblocking collectives: each returns a plan that is under way."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.calls import arguments
from collectives.calls.engine import AnyPlan, Engine


class Nonblocking:
    """``Wait`` for what these return, with calls of ``Test`` in between."""

    _engine: Engine

    def Iallreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Allreduce` under way."""
        return self._engine.make(arguments.allreduce(sendbuf, recvbuf, op), algorithm).begin()

    def Ireduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Reduce_scatter_block` under way."""
        return self._engine.make(
            arguments.reduce_scatter_block(sendbuf, recvbuf, op), algorithm
        ).begin()

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Reduce_scatter` under way."""
        return self._engine.make(
            arguments.reduce_scatter(sendbuf, recvbuf, recvcounts, op), algorithm
        ).begin()

    def Iallgather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Allgather` under way."""
        return self._engine.make(arguments.allgather(sendbuf, recvbuf), algorithm).begin()

    def Iallgatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Allgatherv` under way."""
        return self._engine.make(arguments.allgatherv(sendbuf, recvbuf), algorithm).begin()

    def Ialltoall(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Alltoall` under way."""
        return self._engine.make(arguments.alltoall(sendbuf, recvbuf), algorithm).begin()

    def Ialltoallv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Alltoallv` under way."""
        return self._engine.make(arguments.alltoallv(sendbuf, recvbuf), algorithm).begin()

    def Ibcast(
        self,
        buf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Bcast` under way."""
        return self._engine.make(arguments.bcast(buf, root), algorithm).begin()

    def Ireduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Reduce` under way."""
        return self._engine.make(arguments.reduce(sendbuf, recvbuf, op, root), algorithm).begin()

    def Igather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Gather` under way."""
        return self._engine.make(arguments.gather(sendbuf, recvbuf, root), algorithm).begin()

    def Igatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Gatherv` under way."""
        return self._engine.make(arguments.gatherv(sendbuf, recvbuf, root), algorithm).begin()

    def Iscatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Scatter` under way."""
        return self._engine.make(arguments.scatter(sendbuf, recvbuf, root), algorithm).begin()

    def Iscatterv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Scatterv` under way."""
        return self._engine.make(arguments.scatterv(sendbuf, recvbuf, root), algorithm).begin()

    def Iscan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Scan` under way."""
        return self._engine.make(arguments.scan(sendbuf, recvbuf, op), algorithm).begin()

    def Iexscan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Exscan` under way."""
        return self._engine.make(arguments.exscan(sendbuf, recvbuf, op), algorithm).begin()

    def Ibarrier(
        self,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """:meth:`Barrier` under way."""
        return self._engine.make(arguments.barrier(), algorithm).begin()
