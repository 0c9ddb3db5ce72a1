"""A drop-in for mpi4py's communicator whose collectives are ours."""

import os
from typing import Any, Self

import numpy.typing as npt
from mpi4py import MPI

from collectives.engine import AnyPlan, Engine


class Communicator(MPI.Intracomm):
    """``MPI.Intracomm`` with ``algorithm=`` on its collectives; the rest is mpi4py's.

    >>> comm = Communicator(MPI.COMM_WORLD)
    >>> comm.Allreduce(sendbuf, recvbuf, op=MPI.SUM, algorithm="ring")   # doctest: +SKIP

    Buffers are given as to mpi4py: ``array``, ``[array, MPI.FLOAT]``, ``[array, count,
    MPI.FLOAT]``, ``MPI.IN_PLACE``.  ``algorithm`` is a name of ``python -m collectives list``, with
    options (``"parameter_server:servers=2"``), ``"native"`` for the MPI library's own, or
    ``"auto"``.  An all-reduce is bitwise equal on all ranks, whatever the algorithm.

    Args:
        comm: the communicator to work on.  It is duplicated at the first collective, so that our
            messages and the caller's cannot meet.
        algorithm: what calls use that name none.
        check: compare every call across ranks first, so that calls that do not belong together
            raise :class:`MismatchError` on all ranks instead of hanging; one small exchange a
            call.  Default: whether ``COLLECTIVES_CHECK`` is set to other than ``0``.
    """

    _engine: Engine

    def __new__(
        cls, comm: MPI.Intracomm | None = None, algorithm: str = "auto", check: bool | None = None
    ) -> Self:
        self = super().__new__(cls, comm)
        if check is None:
            check = os.environ.get("COLLECTIVES_CHECK", "0") != "0"
        self._engine = Engine(self, algorithm, check)
        return self

    @property
    def last_plan(self) -> AnyPlan | None:
        """The plan of the last call: its ``algorithm`` and the ``reason`` for it."""
        return self._engine.last_plan

    def Allreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> None:
        """Reduces ``sendbuf`` over all ranks into every rank's ``recvbuf``."""
        self._engine.run("allreduce", sendbuf, recvbuf, op, algorithm)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> None:
        """Reduces block j of every rank's ``sendbuf`` into rank j's ``recvbuf``; not in place."""
        self._engine.run("reduce_scatter", sendbuf, recvbuf, op, algorithm)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Gathers every rank's ``sendbuf`` into every rank's ``recvbuf``, in rank order."""
        self._engine.run("allgather", sendbuf, recvbuf, None, algorithm)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Sends block j of ``sendbuf`` to rank j, and receives its block into place j."""
        self._engine.run("alltoall", sendbuf, recvbuf, None, algorithm)

    def Bcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> None:
        """Copies ``buf`` of rank ``root`` to every rank's."""
        self._engine.run("broadcast", MPI.IN_PLACE, buf, None, algorithm, root)

    def Ibcast(  # type: ignore[override]
        self, buf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> AnyPlan:
        """:meth:`Bcast` under way."""
        plan = self._engine.make("broadcast", MPI.IN_PLACE, buf, None, algorithm, root)
        return plan.begin()

    def Bcast_init(  # type: ignore[override]
        self,
        buf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Bcast`."""
        return self._engine.make("broadcast", MPI.IN_PLACE, buf, None, algorithm, root)

    def Iallreduce(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> AnyPlan:
        """:meth:`Allreduce` under way; ``Wait`` for it, with calls of ``Test`` in between."""
        return self._engine.make("allreduce", sendbuf, recvbuf, op, algorithm).begin()

    def Ireduce_scatter_block(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> AnyPlan:
        """:meth:`Reduce_scatter_block` under way."""
        return self._engine.make("reduce_scatter", sendbuf, recvbuf, op, algorithm).begin()

    def Iallgather(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None
    ) -> AnyPlan:
        """:meth:`Allgather` under way."""
        return self._engine.make("allgather", sendbuf, recvbuf, None, algorithm).begin()

    def Ialltoall(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None
    ) -> AnyPlan:
        """:meth:`Alltoall` under way."""
        return self._engine.make("alltoall", sendbuf, recvbuf, None, algorithm).begin()

    def Allreduce_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allreduce`; it keeps the buffers alive.  Collective, like MPI's."""
        return self._engine.make("allreduce", sendbuf, recvbuf, op, algorithm)

    def Reduce_scatter_block_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Reduce_scatter_block`."""
        return self._engine.make("reduce_scatter", sendbuf, recvbuf, op, algorithm)

    def Allgather_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allgather`."""
        return self._engine.make("allgather", sendbuf, recvbuf, None, algorithm)

    def Alltoall_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Alltoall`."""
        return self._engine.make("alltoall", sendbuf, recvbuf, None, algorithm)

    def empty(self, shape: Any, dtype: Any = float) -> npt.NDArray[Any]:
        """A new array of zeros on every rank, in memory that the ranks of a node can all address.

        Collectives on such arrays are loads and stores: no message is sent.  Collective; the shape
        may differ between ranks.  The memory goes with the last array in it.  It is ordinary
        memory where the ranks are on several nodes, cannot open one another's memory (containers of
        their own), or run on a processor other than x86-64; the log says so.
        """
        return self._engine.empty(shape, dtype)

    def Dup(self, info: MPI.Info | None = None) -> Self:
        return self._like(super().Dup(info))

    def Split(self, color: int = 0, key: int = 0) -> Self:
        return self._like(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Self:
        return self._like(super().Split_type(split_type, key, info))

    def Free(self) -> None:
        """Frees this handle's communicator, with everything that :meth:`close` releases."""
        self.close()
        super().Free()

    def close(self) -> None:
        """Releases plans and the duplicate; the communicator itself stays usable.  Collective."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:  # with one rank in trouble, a collective Free would hang
            self.close()

    def _like(self, comm: MPI.Comm) -> Self:
        """``comm`` with this communicator's settings."""
        if comm == MPI.COMM_NULL:
            return comm  # type: ignore[return-value]  # as mpi4py: the rank is in no group
        return type(self)(comm, self._engine.algorithm, self._engine.check)  # type: ignore[arg-type]
