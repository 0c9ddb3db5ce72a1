"""What a nonblocking call returns that the MPI library carries out."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self

from mpi4py import MPI

from collectives.execution.underway import Underway

if TYPE_CHECKING:
    from collectives.calls.native import NativePlan
    from collectives.failure import Watched


class NativeRequest(MPI.Request):
    """The library's own request, so that ``MPI.Request.Waitall`` and the like take it with others;
    and a plan for one run, whose ``Wait`` moves this thread's other plans along.

    Attributes:
        plan: what it is a run of.
        watched: whom its waits are told, if a watchdog looks.
    """

    algorithm = "native"
    plan: "NativePlan"
    watched: "Watched | None"
    _underway: Underway
    _buffers: Any

    def __new__(
        cls, request: MPI.Request, plan: "NativePlan", underway: Underway, buffers: Any
    ) -> Self:
        """``buffers`` are kept until it has ended, which mpi4py's requests do not do."""
        self = super().__new__(cls, request)
        self.plan = plan
        self.watched = None
        self._underway = underway
        self._buffers = buffers
        return self

    @property
    def collective(self) -> str:
        """By the name of its algorithms."""
        return self.plan.collective

    @property
    def reason(self) -> str:
        """Why it is native."""
        return self.plan.reason

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Makes progress; returns whether it has completed."""
        done = super().Test(status)
        if done:
            self._buffers = None
        if self.watched is not None:
            self.watched.tested(done)
        return done

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Completes it; plans that this thread has started go on meanwhile."""
        with self._waiting():
            while self._underway.here:
                if super().Test(status):
                    break
                self._underway.progress()
            else:
                super().Wait(status)
        self._buffers = None
        return True

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watched is None else self.watched.waiting("Wait for")

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """:meth:`Test`, and no object."""
        return self.Test(status), None

    def wait(self, status: MPI.Status | None = None) -> None:
        """:meth:`Wait`."""
        self.Wait(status)

    def synchronize(self) -> None:
        """:meth:`Wait`: of MPI's, nothing is queued."""
        self.Wait()

    def Start(self) -> None:
        """There is one run.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{self!r} was started, and is for one run; make another one")

    def Free(self) -> None:
        """Does nothing, as it has no second run.

        Raises:
            RuntimeError: it is under way.
        """
        if self != MPI.REQUEST_NULL:
            raise RuntimeError(f"{self!r} is under way; Wait for it before Free")

    def __repr__(self) -> str:
        return f"<NativeRequest: {self.collective}>"
