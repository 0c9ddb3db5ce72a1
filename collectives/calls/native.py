"""The MPI library's own collective, in the shape of a plan: the row beside ours."""

import weakref
from functools import partial
from typing import Any, Self

from mpi4py import MPI

from collectives.calls.arguments import Arguments
from collectives.calls.gaps import free_types

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


def call_native(comm: MPI.Intracomm, arguments: Arguments) -> None:
    """The MPI library's own collective, once."""
    getattr(MPI.Intracomm, _method(arguments))(comm, *_as_mpi_takes_them(arguments))


class NativePlan:
    """A :class:`~collectives.execution.plan.Plan` to its user; the buffers are mpi4py's to read."""

    algorithm = "native"

    def __init__(self, comm: MPI.Intracomm, arguments: Arguments, reason: str) -> None:
        self.collective = arguments.collective
        self.reason = reason
        name = _method(arguments)
        types: dict[int, MPI.Datatype] = {}
        given = [_as_it_is_now(one, types) for one in _as_mpi_takes_them(arguments)]
        if types:
            weakref.finalize(self, free_types, types.values()).atexit = False
        self._run = partial(getattr(MPI.Intracomm, name), comm, *given)
        self._start = partial(getattr(MPI.Intracomm, f"I{name.lower()}"), comm, *given)
        self._request: MPI.Request = MPI.REQUEST_NULL
        self._transient = False
        self._freed = False

    def __call__(self) -> None:
        """Runs the collective to its end."""
        self._expect_idle("run")
        self._run()

    def Start(self) -> None:
        """Starts it.

        Raises:
            RuntimeError: it was freed, or is under way.
        """
        self._expect_idle("started")
        self._request = self._start()

    def begin(self) -> Self:
        """Starts it, for one run."""
        self.Start()
        self._transient = True
        return self

    def Test(self) -> bool:
        """Makes progress; returns whether it has completed."""
        done = self._request.Test()
        if done and self._transient:
            self.Free()
        return done

    def Wait(self) -> None:
        """Completes it."""
        self._request.Wait()
        if self._transient:
            self.Free()

    def Free(self) -> None:
        """Lets go of the buffers; the plan cannot be used after it.

        Raises:
            RuntimeError: it is under way.
        """
        self._expect_ended("Wait for it before Free")
        self._run = self._start = None  # type: ignore[assignment]
        self._freed = True

    def _expect_idle(self, what: str) -> None:
        if self._freed:
            raise RuntimeError(f"{self!r} was freed; make another one")
        self._expect_ended(f"it cannot be {what} again without Wait or a true Test")

    def _expect_ended(self, instead: str) -> None:
        if self._request != MPI.REQUEST_NULL:
            raise RuntimeError(f"{self!r} is under way; {instead}")

    def __repr__(self) -> str:
        return f"<NativePlan: {self.collective}>"


def _method(arguments: Arguments) -> str:
    name = _METHODS[arguments.collective]
    if arguments.vector or arguments.recvcounts is not None:
        return "Reduce_scatter" if arguments.collective == "reduce_scatter" else f"{name}v"
    return name


def _as_it_is_now(spec: Any, types: dict[int, MPI.Datatype]) -> Any:
    """A specification that the caller's changes to it do not reach, as MPI reads it once.

    Duplicates of the caller's own types, which may be freed, are added to ``types``, by handle.
    """
    if type(spec) in (list, tuple):
        return type(spec)(_as_it_is_now(part, types) for part in spec)
    if isinstance(spec, MPI.Datatype) and not (spec == MPI.DATATYPE_NULL or spec.is_predefined):
        if spec.handle not in types:
            types[spec.handle] = spec.Dup()
        return types[spec.handle]
    return spec


def _as_mpi_takes_them(arguments: Arguments) -> tuple[Any, ...]:
    collective, sendbuf, recvbuf, op, root, vector, recvcounts = arguments
    if collective == "barrier":
        return ()
    if collective == "broadcast":
        return recvbuf, root
    if collective == "scatter":
        return sendbuf, MPI.IN_PLACE if recvbuf is None else recvbuf, root
    given = (MPI.IN_PLACE if sendbuf is None else sendbuf, recvbuf)
    if collective == "reduce_scatter" and (vector or recvcounts is not None):
        return (*given, recvcounts, op)
    if collective == "gather":
        return (*given, root)
    if collective == "reduce":
        return (*given, op, root)
    return given if op is None else (*given, op)
