"""The persistent collectives: each returns a plan to be run again and again."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.calls import arguments
from collectives.calls.engine import AnyPlan, Engine


class Persistent:
    """What these return keeps the buffers alive.  Collective, as MPI's.

    Buffers and errors are those of :class:`~collectives.calls.methods.blocking.Blocking`.  Each
    returns a plan, to be run by ``Start`` and ``Wait`` or as a function, until ``Free``.  ``info``
    is there as MPI has it, and is ignored.
    """

    _engine: Engine

    def Allreduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allreduce`."""
        return self._engine.make(arguments.allreduce(sendbuf, recvbuf, op), algorithm)

    def Reduce_scatter_block_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Reduce_scatter_block`."""
        return self._engine.make(arguments.reduce_scatter_block(sendbuf, recvbuf, op), algorithm)

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Reduce_scatter`."""
        return self._engine.make(
            arguments.reduce_scatter(sendbuf, recvbuf, recvcounts, op), algorithm
        )

    def Allgather_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allgather`."""
        return self._engine.make(arguments.allgather(sendbuf, recvbuf), algorithm)

    def Allgatherv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allgatherv`."""
        return self._engine.make(arguments.allgatherv(sendbuf, recvbuf), algorithm)

    def Alltoall_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Alltoall`."""
        return self._engine.make(arguments.alltoall(sendbuf, recvbuf), algorithm)

    def Alltoallv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Alltoallv`."""
        return self._engine.make(arguments.alltoallv(sendbuf, recvbuf), algorithm)

    def Bcast_init(
        self,
        buf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Bcast`."""
        return self._engine.make(arguments.bcast(buf, root), algorithm)

    def Reduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Reduce`."""
        return self._engine.make(arguments.reduce(sendbuf, recvbuf, op, root), algorithm)

    def Gather_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Gather`."""
        return self._engine.make(arguments.gather(sendbuf, recvbuf, root), algorithm)

    def Gatherv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Gatherv`."""
        return self._engine.make(arguments.gatherv(sendbuf, recvbuf, root), algorithm)

    def Scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Scatter`."""
        return self._engine.make(arguments.scatter(sendbuf, recvbuf, root), algorithm)

    def Scatterv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Scatterv`."""
        return self._engine.make(arguments.scatterv(sendbuf, recvbuf, root), algorithm)

    def Scan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Scan`."""
        return self._engine.make(arguments.scan(sendbuf, recvbuf, op), algorithm)

    def Exscan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Exscan`."""
        return self._engine.make(arguments.exscan(sendbuf, recvbuf, op), algorithm)

    def Barrier_init(
        self,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: Algorithm | str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Barrier`."""
        return self._engine.make(arguments.barrier(), algorithm)
