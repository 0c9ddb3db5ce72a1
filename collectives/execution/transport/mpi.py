"""Two-sided MPI: persistent requests on a communicator of our own, with or without envelopes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.errors import MismatchError
from collectives.execution.transport import Bytes, Request
from collectives.execution.waiting import wait_for

#: A rank that waits for a message of so many bytes gives its core away: MPI polls, and takes it
#: from the program's other threads.  Below, the yields themselves would be felt.
_LONG_BYTES = 256 << 10


def largest_tag() -> int:
    """The largest tag of this MPI, which no plan uses."""
    return MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767


class Envelope:
    """Bytes and a number as one message: an MPI type joins the two places in memory.

    So the number costs no message of its own.

    Attributes:
        data: the bytes.
        number: shape (1,); sent behind them.
        message: the buffer specification for mpi4py's calls.
    """

    def __init__(self, data: Bytes, dtype: npt.DTypeLike) -> None:
        self.data = data
        self.number = np.zeros(1, dtype)
        self._type = MPI.BYTE.Create_hindexed(
            [data.nbytes, self.number.nbytes], [data.ctypes.data, self.number.ctypes.data]
        ).Commit()
        self.message = [MPI.BOTTOM, 1, self._type]

    def seal(self) -> None:
        """Writes the number, before the message is sent."""

    def expect(self) -> None:
        """Forgets the last message, before another one is received."""

    def is_there(self) -> bool:
        """After MPI has sent or received it: whether it counts as sent or received."""
        return True

    def check(self, comm: MPI.Intracomm, source: int | None) -> None:
        """After MPI has sent or received it: returns once it counts as sent or received.

        Args:
            comm: the communicator of ``source``.
            source: the sender of a message that was received; ``None`` for one that was sent.

        Raises:
            CorruptMessage: the bytes are not those that were sent.
        """

    def free(self) -> None:
        """Releases the MPI type."""
        self._type.Free()


class LongMessage(MPI.Prequest):
    """A persistent send or receive that gives the core away while a rank waits for it."""

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        wait_for(partial(self.Test, status))
        return True


class Receive:
    """A persistent receive of ``nbytes``: it raises :class:`MismatchError` for another number.

    MPI takes a shorter message without a word, and leaves alone what lies behind it.
    """

    def __init__(self, request: MPI.Prequest, nbytes: int, peer: int, rank: int) -> None:
        self.request, self.nbytes, self.peer, self.rank = request, nbytes, peer, rank
        self.Start, self.Free = request.Start, request.Free
        wait = request.Wait if nbytes < _LONG_BYTES else LongMessage(request).Wait
        status = MPI.Status()
        count = status.Get_count

        def checked() -> None:  # a closure, as a method would take three times as long: 0.1 us
            try:
                wait(status)
            except MPI.Exception as error:
                self.explain(error.Get_error_class())
                raise
            if count() != nbytes:
                self.compare(status)

        self.Wait = checked

    def compare(self, status: MPI.Status) -> None:
        """Raises for a message that was shorter; a request that has ended before has no status."""
        if (came := status.Get_count()) != self.nbytes and status.Get_source() != MPI.ANY_SOURCE:
            self.refuse(came)

    def explain(self, error: int) -> None:
        """Raises for a message that was longer than its buffer."""
        if error == MPI.ERR_TRUNCATE:
            self.refuse("more")

    def refuse(self, came: object) -> NoReturn:
        """Raises :class:`MismatchError`."""
        raise MismatchError(
            f"rank {self.rank} expects {self.nbytes} bytes from rank {self.peer}, which sends "
            f"{came}: their calls or counts differ; COLLECTIVES_CHECK=1 names both lines"
        )


class MPITransport:
    """Messages over ``channel``, a communicator that nothing else sends on.

    Requests are persistent, as that reads the arguments once: three quarters of the price of a
    ``Sendrecv`` of 8 bytes.  All messages are bytes, so types that the MPI library lacks (float16,
    bfloat16) travel as well.
    """

    #: Many MPI libraries count in 32 bits.
    longest = 1 << 30
    #: Whether messages carry checksums: collectives then send nothing in any other way.
    has_checksums = False
    #: Whether messages arrive as over a slower link: again, nothing is sent in any other way.
    delays = False

    def __init__(self, channel: MPI.Intracomm) -> None:
        self.channel = channel
        self.rank = channel.rank
        self.size = channel.size

    @classmethod
    def envelope(cls, data: Bytes) -> Envelope | None:
        """The envelope of a message of these bytes; ``None`` if it needs none."""
        return None

    def send_init(self, data: Bytes, peer: int, tag: int) -> Request:
        request = self.channel.Send_init([data, data.nbytes, MPI.BYTE], peer, tag)
        return request if data.nbytes < _LONG_BYTES else LongMessage(request)

    def recv_init(self, data: Bytes, peer: int, tag: int) -> Request:
        request = self.channel.Recv_init([data, data.nbytes, MPI.BYTE], peer, tag)
        return Receive(request, data.nbytes, peer, self.rank)

    @staticmethod
    def testall(requests: Sequence[Any]) -> bool:
        statuses: list[MPI.Status] = []
        theirs = [getattr(request, "request", request) for request in requests]
        received = [(at, one) for at, one in enumerate(requests) if isinstance(one, Receive)]
        try:
            done = MPI.Request.Testall(theirs, statuses)
        except MPI.Exception:
            for at, one in received:
                one.explain(MPI.Get_error_class(statuses[at].Get_error()))
            raise
        for at, one in received if done else ():
            one.compare(statuses[at])
        return done


@dataclass(eq=False)
class EnvelopedRequest:
    """A persistent send or receive of an envelope.

    Attributes:
        before: called before each start.
        channel, source: arguments of :meth:`Envelope.check`.
        checked: whether the last message has been.
    """

    envelope: Envelope
    request: MPI.Prequest | Receive
    before: Callable[[], None]
    channel: MPI.Intracomm
    source: int | None
    checked: bool = True

    def Start(self) -> None:
        self.checked = False
        self.before()
        self.request.Start()

    def Wait(self) -> None:
        self.request.Wait()
        self.check()

    def check(self) -> None:
        """Once: afterwards the bytes are the caller's, who may change them."""
        if not self.checked:
            self.checked = True
            self.envelope.check(self.channel, self.source)

    def Free(self) -> None:
        self.request.Free()
        self.envelope.free()


class EnvelopedTransport(MPITransport):
    """A transport whose messages are all envelopes; a subclass makes them."""

    @classmethod
    def envelope(cls, data: Bytes) -> Envelope:
        raise NotImplementedError

    def send_init(self, data: Bytes, peer: int, tag: int) -> EnvelopedRequest:
        envelope = self.envelope(data)
        request = self.channel.Send_init(envelope.message, peer, tag)
        return EnvelopedRequest(envelope, request, envelope.seal, self.channel, None)

    def recv_init(self, data: Bytes, peer: int, tag: int) -> EnvelopedRequest:
        envelope = self.envelope(data)
        nbytes = data.nbytes + envelope.number.nbytes
        request = Receive(
            self.channel.Recv_init(envelope.message, peer, tag), nbytes, peer, self.rank
        )
        return EnvelopedRequest(envelope, request, envelope.expect, self.channel, peer)

    @staticmethod
    def testall(requests: Sequence[Any]) -> bool:
        if not MPITransport.testall([request.request for request in requests]):
            return False
        # All of them are asked, as those that come over one link arrive one after the other.
        if not all([request.envelope.is_there() for request in requests]):
            return False
        for request in requests:
            request.check()
        return True
