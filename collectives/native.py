"""The MPI library's own collective, in the shape of a plan: the row beside ours."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from mpi4py import MPI

_BLOCKING: dict[str, Callable[..., None]] = {
    "allreduce": MPI.Intracomm.Allreduce,
    "reduce_scatter": MPI.Intracomm.Reduce_scatter_block,
    "allgather": MPI.Intracomm.Allgather,
    "alltoall": MPI.Intracomm.Alltoall,
    "broadcast": MPI.Intracomm.Bcast,
}
_NONBLOCKING: dict[str, Callable[..., MPI.Request]] = {
    "allreduce": MPI.Intracomm.Iallreduce,
    "reduce_scatter": MPI.Intracomm.Ireduce_scatter_block,
    "allgather": MPI.Intracomm.Iallgather,
    "alltoall": MPI.Intracomm.Ialltoall,
    "broadcast": MPI.Intracomm.Ibcast,
}


class NativePlan:
    """Same interface as :class:`collectives.plan.Plan`; the buffers are mpi4py's to read."""

    algorithm = "native"

    def __init__(
        self,
        comm: MPI.Intracomm,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | None,
        root: int,
        reason: str,
    ) -> None:
        self.collective = collective
        self.reason = reason
        arguments: tuple[Any, ...]
        if collective == "broadcast":
            arguments = (comm, recvbuf, root)
        else:
            sendbuf = MPI.IN_PLACE if sendbuf is None else sendbuf
            arguments = (comm, sendbuf, recvbuf) if op is None else (comm, sendbuf, recvbuf, op)
        self._run = partial(_BLOCKING[collective], *arguments)
        self._start = partial(_NONBLOCKING[collective], *arguments)
        self._request: MPI.Request = MPI.REQUEST_NULL

    def __call__(self) -> None:
        """Runs the collective to its end."""
        self._run()

    def Start(self) -> None:
        """Starts it."""
        self._request = self._start()

    def begin(self) -> Self:
        """Starts it, for one run."""
        self.Start()
        return self

    def Test(self) -> bool:
        """Makes progress; returns whether it has completed."""
        return self._request.Test()

    def Wait(self) -> None:
        """Completes it."""
        self._request.Wait()

    def Free(self) -> None:
        """Nothing to release."""

    def __repr__(self) -> str:
        return f"<NativePlan: {self.collective}>"
