"""The methods for Python objects, and ``Alltoallw``: mpi4py's own."""

from contextlib import AbstractContextManager
from typing import Any

from mpi4py import MPI

from collectives.calls.engine import Engine


class Objects(MPI.Intracomm):
    """mpi4py's, which the watchdog sees.

    They move no plan along: those of this communicator are ended first, as all ranks have started
    them.
    """

    _engine: Engine

    def allgather(self, sendobj: Any) -> list[Any]:
        with self._blocking("allgather of objects"):
            return super().allgather(sendobj)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        with self._blocking("allreduce of objects"):
            return super().allreduce(sendobj, op)

    def alltoall(self, sendobj: Any) -> list[Any]:
        with self._blocking("alltoall of objects"):
            return super().alltoall(sendobj)

    def barrier(self) -> None:
        with self._blocking("barrier"):
            return super().barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        with self._blocking("bcast of an object"):
            return super().bcast(obj, root)

    def exscan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        with self._blocking("exscan of objects"):
            return super().exscan(sendobj, op)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        with self._blocking("gather of objects"):
            return super().gather(sendobj, root)

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        with self._blocking("reduce of objects"):
            return super().reduce(sendobj, op, root)

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        with self._blocking("scan of objects"):
            return super().scan(sendobj, op)

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        with self._blocking("scatter of objects"):
            return super().scatter(sendobj, root)

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        with self._blocking("alltoallw"):
            return super().Alltoallw(sendbuf, recvbuf)

    def _blocking(self, what: str) -> AbstractContextManager[None]:
        return self._engine.after_plans(what)
