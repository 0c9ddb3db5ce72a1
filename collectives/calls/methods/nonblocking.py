"""The nonblocking collectives: each returns what is under way."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.calls import arguments
from collectives.calls.engine import Begun, Engine


class Nonblocking:
    """``Wait`` for what these return, with calls of ``Test`` in between.

    Buffers and errors are those of :class:`~collectives.calls.methods.blocking.Blocking`; the
    buffers are the plan's until ``Wait`` has returned, or ``Test`` ``True``.  Each returns a plan
    for one run; where the MPI library carries it out, that is an ``MPI.Request``, too.
    """

    _engine: Engine

    def Iallreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Allreduce` under way."""
        return self._engine.begin(arguments.allreduce(sendbuf, recvbuf, op), algorithm)

    def Ireduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Reduce_scatter_block` under way."""
        return self._engine.begin(arguments.reduce_scatter_block(sendbuf, recvbuf, op), algorithm)

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Reduce_scatter` under way."""
        return self._engine.begin(
            arguments.reduce_scatter(sendbuf, recvbuf, recvcounts, op), algorithm
        )

    def Iallgather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Allgather` under way."""
        return self._engine.begin(arguments.allgather(sendbuf, recvbuf), algorithm)

    def Iallgatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Allgatherv` under way."""
        return self._engine.begin(arguments.allgatherv(sendbuf, recvbuf), algorithm)

    def Ialltoall(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Alltoall` under way."""
        return self._engine.begin(arguments.alltoall(sendbuf, recvbuf), algorithm)

    def Ialltoallv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Alltoallv` under way."""
        return self._engine.begin(arguments.alltoallv(sendbuf, recvbuf), algorithm)

    def Ibcast(
        self,
        buf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Bcast` under way."""
        return self._engine.begin(arguments.bcast(buf, root), algorithm)

    def Ireduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Reduce` under way."""
        return self._engine.begin(arguments.reduce(sendbuf, recvbuf, op, root), algorithm)

    def Igather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Gather` under way."""
        return self._engine.begin(arguments.gather(sendbuf, recvbuf, root), algorithm)

    def Igatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Gatherv` under way."""
        return self._engine.begin(arguments.gatherv(sendbuf, recvbuf, root), algorithm)

    def Iscatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Scatter` under way."""
        return self._engine.begin(arguments.scatter(sendbuf, recvbuf, root), algorithm)

    def Iscatterv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Scatterv` under way."""
        return self._engine.begin(arguments.scatterv(sendbuf, recvbuf, root), algorithm)

    def Iscan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Scan` under way."""
        return self._engine.begin(arguments.scan(sendbuf, recvbuf, op), algorithm)

    def Iexscan(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Exscan` under way."""
        return self._engine.begin(arguments.exscan(sendbuf, recvbuf, op), algorithm)

    def Ibarrier(
        self,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> Begun:
        """:meth:`Barrier` under way."""
        return self._engine.begin(arguments.barrier(), algorithm)
