"""Waits for messages and requests, during which the collectives that are under way go on."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from mpi4py import MPI

from collectives.calls.engine import Engine
from collectives.execution.progress import Part, Testable

P = ParamSpec("P")
R = TypeVar("R")


def _finished(
    send: Callable[Concatenate[Any, P], None], begin: Callable[Concatenate[Any, P], MPI.Request]
) -> Callable[Concatenate[Any, P], None]:
    """mpi4py's blocking send, by the nonblocking one while plans are under way."""

    @wraps(send)
    def called(self: Any, *given: P.args, **named: P.kwargs) -> None:
        if not self._engine.progress.here:
            return send(self, *given, **named)
        self._finish(begin(self, *given, **named))

    return called


def _awaited(probe: Callable[[Any, int, int, MPI.Status | None], R]) -> Callable[..., R]:
    """mpi4py's probe, once there is a message."""

    @wraps(probe)
    def called(
        self: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> R:
        self._await_message(source, tag)
        return probe(self, source, tag, status)

    return called


class PointToPoint:
    """mpi4py's blocking sends, receives and probes.

    MPI promises that a nonblocking collective goes on while its rank waits for a message.  So a
    rank that has plans under way waits here by turns for the message and for those.
    ``Sendrecv_replace``, and the waits of mpi4py's own requests, are left as they are: call
    ``Test`` of your plans there.
    """

    _engine: Engine

    Send = _finished(MPI.Comm.Send, MPI.Comm.Isend)
    Ssend = _finished(MPI.Comm.Ssend, MPI.Comm.Issend)
    send = _finished(MPI.Comm.send, MPI.Comm.isend)
    ssend = _finished(MPI.Comm.ssend, MPI.Comm.issend)
    Probe = _awaited(MPI.Comm.Probe)
    Mprobe = _awaited(MPI.Comm.Mprobe)
    probe = _awaited(MPI.Comm.probe)
    mprobe = _awaited(MPI.Comm.mprobe)

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        if not self._engine.progress.here:
            return super().Recv(buf, source, tag, status)  # type: ignore[misc]
        receive = self.Irecv(buf, source, tag)  # type: ignore[attr-defined]
        self._finish(receive, status, receive)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        if not self._engine.progress.here:
            return super().Sendrecv(  # type: ignore[misc]
                sendbuf, dest, sendtag, recvbuf, source, recvtag, status
            )
        send = self.Isend(sendbuf, dest, sendtag)  # type: ignore[attr-defined]
        receive = self.Irecv(recvbuf, source, recvtag)  # type: ignore[attr-defined]
        self._finish(send, receive=receive)
        self._finish(receive, status, receive)

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        self._await_message(source, tag)
        return super().recv(buf, source, tag, status)  # type: ignore[misc]

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        if not self._engine.progress.here:
            return super().sendrecv(  # type: ignore[misc]
                sendobj, dest, sendtag, recvbuf, source, recvtag, status
            )
        sent = self.isend(sendobj, dest, sendtag)  # type: ignore[attr-defined]
        received = self.recv(recvbuf, source, recvtag, status)
        self._finish(sent)
        return received

    def _await_message(self, source: int, tag: int) -> None:
        progress = self._engine.progress
        while progress.here and not self.Iprobe(source, tag):  # type: ignore[attr-defined]
            progress.advance()

    def _finish(
        self,
        request: MPI.Request,
        status: MPI.Status | None = None,
        receive: MPI.Request | None = None,
    ) -> None:
        """Ends a request, and moves plans along meanwhile.

        An error takes ``receive`` back or completes it, as MPI would write into memory that the
        program may use for something else.
        """
        try:
            while not request.Test(status):
                self._engine.progress.advance()
        except BaseException:  # a signal handler's
            self._engine.progress.hold(request)
            if receive:
                receive.Cancel()
                receive.Wait()
            raise


class Requests:
    """Starts and completes plans and requests together; MPI's own ``Startall`` and ``Waitall`` know
    nothing of plans, and would not move them along."""

    _engine: Engine

    def Startall(self, plans: Iterable[Part]) -> None:
        """Starts persistent plans, and mpi4py's persistent requests, in this order, the same on all
        ranks."""
        for plan in plans:
            plan.Start()

    def Testall(self, requests: Iterable[Testable]) -> bool:
        """Moves plans and mpi4py's requests along; returns whether all have completed."""
        return all([request.Test() for request in requests])

    def Waitall(self, requests: Iterable[Testable]) -> None:
        """Completes plans and mpi4py's requests, in whatever order they end; all plans that this
        thread has started go on meanwhile."""
        left = list(requests)
        with self._engine.waiting("Waitall", by_all=False):
            while not self.Testall(left):
                self._engine.progress.advance()
