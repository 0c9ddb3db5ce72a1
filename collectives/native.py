"""The MPI library's own collective, in the shape of a plan: the row beside ours."""

from functools import partial
from typing import Any, Self

from mpi4py import MPI

from collectives.call import Arguments

#: The names of MPI's methods; nonblocking ones begin with an I.
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


class NativePlan:
    """Same interface as :class:`collectives.plan.Plan`; the buffers are mpi4py's to read."""

    algorithm = "native"

    def __init__(self, comm: MPI.Intracomm, arguments: Arguments, reason: str) -> None:
        self.collective = arguments.collective
        self.reason = reason
        name = _METHODS[self.collective]
        if arguments.recvcounts is not None:
            name = "Reduce_scatter"
        elif arguments.vector:
            name += "v"
        given = _as_mpi_takes_them(arguments)
        self._run = partial(getattr(MPI.Intracomm, name), comm, *given)
        self._start = partial(getattr(MPI.Intracomm, f"I{name.lower()}"), comm, *given)
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


def _as_mpi_takes_them(arguments: Arguments) -> tuple[Any, ...]:
    collective, sendbuf, recvbuf, op, root, _, recvcounts = arguments
    if collective == "barrier":
        return ()
    if collective == "broadcast":
        return recvbuf, root
    if collective == "scatter":
        return sendbuf, MPI.IN_PLACE if recvbuf is None else recvbuf, root
    given = (MPI.IN_PLACE if sendbuf is None else sendbuf, recvbuf)
    if recvcounts is not None:
        return (*given, recvcounts, op)
    if collective == "gather":
        return (*given, root)
    if collective == "reduce":
        return (*given, op, root)
    return given if op is None else (*given, op)
