"""Messages of virtual ranks, by the names of MPI."""

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI as library
from mpi4py.MPI import pickle

from collectives.virtual.buffers import Gapped, memory
from collectives.virtual.messages import ANY_SOURCE, ANY_TAG, MessageEnd
from collectives.virtual.rank import here
from collectives.virtual.requests import (
    Begun,
    Handled,
    Prequest,
    ProbedMessage,
    Together,
    VirtualRequest,
    forms,
)


class VirtualMessages(Handled):
    """The messages of a communicator; its handle is a :class:`Context`."""

    @property
    def rank(self) -> int:
        return int(self.handle.numbers[here().number])

    def _receive(self, data: Any, source: int, tag: int) -> MessageEnd:
        return MessageEnd(self.handle, False, data, source, self.rank, tag)

    def _send(self, data: Any, dest: int, tag: int, *, is_met: bool = False) -> MessageEnd:
        """``is_met``: it is complete only once its receive is posted."""
        packed = data.copy() if isinstance(data, Gapped) else data
        end = MessageEnd(self.handle, True, packed, self.rank, dest, tag)
        end.is_eager &= not is_met
        return end

    def _buffer(self, buf: Any, dest: int, tag: int = 0, is_met: bool = False) -> MessageEnd:
        return self._send(memory(buf), dest, tag, is_met=is_met).post()

    def _object(self, obj: Any, dest: int, tag: int = 0, is_met: bool = False) -> MessageEnd:
        return self._send(pickled(obj), dest, tag, is_met=is_met).post()

    Send, Isend, Send_init = Bsend, Ibsend, Bsend_init = Rsend, Irsend, Rsend_init = forms(_buffer)
    Ssend, Issend, Ssend_init = forms(_buffer, is_met=True)
    send, isend, _ = bsend, ibsend, _ = forms(_object)
    ssend, issend, _ = forms(_object, is_met=True)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> VirtualRequest:
        return VirtualRequest.of(self._receive(memory(buf, True), source, tag).post())

    def irecv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG
    ) -> VirtualRequest:
        return VirtualRequest.of(self._receive(None, source, tag).post())

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> None:
        self.Irecv(buf, source, tag).Wait(status)

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> Any:
        return self.irecv(buf, source, tag).wait(status)

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, *where: Any, **at: Any
    ) -> None:
        """``where`` and ``at``: source, recvtag and status, as mpi4py's."""
        self._both(self.Isend(sendbuf, dest, sendtag), self.Irecv, recvbuf, *where, **at)

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, *where: Any, **at: Any
    ) -> Any:
        return self._both(self.isend(sendobj, dest, sendtag), self.irecv, recvbuf, *where, **at)

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, *where: Any, **at: Any
    ) -> None:
        self._both(self.Isend(memory(buf).copy(), dest, sendtag), self.Irecv, buf, *where, **at)

    @staticmethod
    def _both(
        sent: VirtualRequest,
        receive: Callable[..., VirtualRequest],
        buf: Any,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Any = None,
    ) -> Any:
        found = receive(buf, source, recvtag).wait(status)
        sent.Wait()
        return found

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        data = memory(buf, True)
        return Prequest.of(lambda: self._receive(data, source, tag).post())

    def _exchange(self, sent: Any, targets: Any, into: Any, sources: Any, twist: int = 0) -> Begun:
        """Sends parts to ``targets``, and receives others from ``sources``, apart from the caller's
        messages.

        ``twist`` is 1 in a grid, where both sides of a dimension may be the same rank: what it
        sends to one side comes from the other.
        """
        apart = VirtualMessages.of(self.handle.apart("exchange"))
        order = [number ^ twist for number in range(len(sources))]
        receives = [apart._receive(into[number], sources[number], 0).post() for number in order]
        sends = [apart._send(*pair, 0).post() for pair in zip(sent, targets, strict=True)]
        return Begun(Together(VirtualRequest.of(one) for one in [*receives, *sends]))

    def _posted(self, source: int, tag: int, status: Any) -> MessageEnd | None:
        here().attend()
        wanted = self._receive(None, source, tag)
        if source == library.PROC_NULL:
            wanted.post().tell(status)
            return wanted
        for send in self.handle.sends[self.rank]:
            if wanted.takes(send):
                send.tell(status)
                return send
        here().look(wanted)
        return None

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        return self._posted(source, tag, status) is not None

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> ProbedMessage | None:
        if (send := self._posted(source, tag, status)) is None:
            return None
        if send.sends:
            self.handle.sends[self.rank].remove(send)
        return ProbedMessage.of(send)

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        while not self.Iprobe(source, tag, status):
            here().idle()
        return True

    def Mprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> ProbedMessage:
        while (found := self.Improbe(source, tag, status)) is None:
            here().idle()
        return found

    iprobe, improbe, probe, mprobe = Iprobe, Improbe, Probe, Mprobe


def pickled(obj: Any) -> Any:
    return np.frombuffer(pickle.dumps(obj), np.uint8)
