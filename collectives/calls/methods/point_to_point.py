"""Waits for messages and requests, during which the collectives that are under way go on."""

from collections.abc import Iterable
from typing import Any, Protocol

from mpi4py import MPI

from collectives.calls.engine import Engine


class PointToPoint:
    """mpi4py's blocking sends, receives and probes.

    MPI promises that a nonblocking collective goes on while its rank waits for a message.  So a
    rank that has plans under way waits here by turns for the message and for those.
    ``Sendrecv_replace``, and the waits of mpi4py's own requests, are left as they are: call
    ``Test`` of your plans there.
    """

    _engine: Engine

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Blocking send."""
        if not self._engine.progress.here:
            return super().Send(buf, dest, tag)  # type: ignore[misc]
        self._finish(self.Isend(buf, dest, tag))  # type: ignore[attr-defined]

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Blocking send that ends when the receive has begun."""
        if not self._engine.progress.here:
            return super().Ssend(buf, dest, tag)  # type: ignore[misc]
        self._finish(self.Issend(buf, dest, tag))  # type: ignore[attr-defined]

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Blocking receive."""
        if not self._engine.progress.here:
            return super().Recv(buf, source, tag, status)  # type: ignore[misc]
        self._finish(self.Irecv(buf, source, tag), status)  # type: ignore[attr-defined]

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
        """Blocking send and receive."""
        if not self._engine.progress.here:
            return super().Sendrecv(  # type: ignore[misc]
                sendbuf, dest, sendtag, recvbuf, source, recvtag, status
            )
        receive = self.Irecv(recvbuf, source, recvtag)  # type: ignore[attr-defined]
        self._finish(self.Isend(sendbuf, dest, sendtag))  # type: ignore[attr-defined]
        self._finish(receive, status)

    def Probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        """Waits until there is a message."""
        self._await_message(source, tag)
        return super().Probe(source, tag, status)  # type: ignore[misc]

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message:
        """Waits until there is a message, and takes it."""
        self._await_message(source, tag)
        return super().Mprobe(source, tag, status)  # type: ignore[misc]

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Blocking send of an object."""
        if not self._engine.progress.here:
            return super().send(obj, dest, tag)  # type: ignore[misc]
        self._finish(self.isend(obj, dest, tag))  # type: ignore[attr-defined]

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Blocking send of an object that ends when the receive has begun."""
        if not self._engine.progress.here:
            return super().ssend(obj, dest, tag)  # type: ignore[misc]
        self._finish(self.issend(obj, dest, tag))  # type: ignore[attr-defined]

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Blocking receive of an object."""
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
        """Blocking send and receive of objects."""
        if not self._engine.progress.here:
            return super().sendrecv(  # type: ignore[misc]
                sendobj, dest, sendtag, recvbuf, source, recvtag, status
            )
        sent = self.isend(sendobj, dest, sendtag)  # type: ignore[attr-defined]
        received = self.recv(recvbuf, source, recvtag, status)
        self._finish(sent)
        return received

    def probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        """Waits until there is a message of an object."""
        self._await_message(source, tag)
        return super().probe(source, tag, status)  # type: ignore[misc]

    def mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message:
        """Waits until there is a message of an object, and takes it."""
        self._await_message(source, tag)
        return super().mprobe(source, tag, status)  # type: ignore[misc]

    def _await_message(self, source: int, tag: int) -> None:
        progress = self._engine.progress
        while progress.here and not self.Iprobe(source, tag):  # type: ignore[attr-defined]
            progress.advance()

    def _finish(self, request: MPI.Request, status: MPI.Status | None = None) -> None:
        while not request.Test(status):
            self._engine.progress.advance()


class Startable(Protocol):
    """A persistent plan, or a persistent request of mpi4py's."""

    def Start(self) -> None:
        """Starts a run."""


class Testable(Protocol):
    """A plan, or a request of mpi4py's."""

    def Test(self) -> bool:
        """Makes progress; returns whether it has completed."""


class Requests:
    """Starts and completes plans and requests together; MPI's own ``Startall`` and ``Waitall`` know
    nothing of plans, and would not move them along."""

    _engine: Engine

    def Startall(self, plans: Iterable[Startable]) -> None:
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
