"""Messages between workers and servers: a header and numbers in one buffer each.

A server has posted a receive for each worker at any time, and sends only to workers that have
posted theirs and wait, so that nobody waits in a send for one that waits in a send.
"""

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from collectives.codec import Codec, Dice
from mpitrain.arrays import Array
from mpitrain.compress import parse
from mpitrain.config import Config, ConfigError
from mpitrain.server.roles import Members
from mpitrain.server.store import WorkerStore
from mpitrain.training.account import traffic_of
from mpitrain.training.parts import Parts

_TAG = 1
_BYTE = np.dtype(np.uint8)
#: MessageKind, clock, clocks; the numbers after it are aligned.
_HEADER = np.dtype([("kind", "<i8"), ("clock", "<i8"), ("clocks", "<i8"), ("unused", "<i8", (5,))])
#: MPI counts the bytes of a message in 32 bits.
_LARGEST = 2**31 - 1


class MessageKind(IntEnum):
    """Kinds of messages."""

    #: A worker wants the parameters, to compute on the batch ``clock``.
    PULL = 1
    #: The gradients of ``clocks`` batches from ``clock`` on.
    PUSH = 2
    #: A worker sends nothing more before the meeting.
    DONE = 3
    #: A worker has failed, and sends nothing more before the meeting.
    FAILED = 4
    #: A server's parameters.
    PARAMETERS = 5
    #: A worker has failed, or the server has: nothing more is to be computed.
    STOP = 6


class ParameterMessage:
    """A header, and numbers of shape (elements,) or the bytes of their code, in one buffer."""

    def __init__(self, size: int, dtype: Any) -> None:
        """Memory for ``size`` elements of this type."""
        self._bytes = np.zeros(_HEADER.itemsize + size * np.dtype(dtype).itemsize, np.uint8)
        self._header = self._bytes[: _HEADER.itemsize].view(_HEADER)
        self.values: Array = self._bytes[_HEADER.itemsize :].view(dtype)

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def buffer(self) -> tuple[Array, MPI.Datatype]:
        return self._bytes, MPI.BYTE

    def write(self, kind: MessageKind, clock: int = 0, clocks: int = 0) -> None:
        self._header[0] = (kind, clock, clocks, 0)

    def header(self) -> tuple[MessageKind, int, int]:
        """The kind of message, its first batch, and the number of batches."""
        kind, clock, clocks, _ = self._header[0].tolist()
        return MessageKind(kind), clock, clocks


def _pushed(size: int, dtype: Any, codec: Codec | None) -> ParameterMessage:
    """Memory for a push of ``size`` numbers, by a code if there is one."""
    return ParameterMessage(codec.nbytes(size), _BYTE) if codec else ParameterMessage(size, dtype)


def check_size(elements: int, servers: int, dtype: Any) -> None:
    """Refuse parts of the parameters that do not fit into a message.

    Raises:
        ConfigError: with the number of servers that would do.
    """
    size = elements * np.dtype(dtype).itemsize
    room = _LARGEST - _HEADER.itemsize - np.dtype(dtype).itemsize
    if -(-size // servers) > room:
        raise ConfigError(
            f"server.ranks = {servers}: a server's part of {size} bytes of parameters does not fit "
            f"into a message of MPI, of {_LARGEST} bytes; take {-(-size // room)} servers or more"
        )


class ParameterExchange:
    """Where a worker has its parameters from, and its gradients go.

    Attributes:
        sent: bytes sent, by clock.
        squares: squared norm of the sum of a clock's gradients, in the part that is updated here.
    """

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.squares: dict[int, float] = {}

    def pull(self, clock: int) -> int | None:
        """Make the worker's parameters those to compute a batch on.

        Returns ``clock``, or a later batch if its step is over without it; None: stop.
        """
        return clock

    def push(self, clock: int, clocks: int, gradient: Array, rate: float) -> None:
        """Use a gradient of ``clocks`` batches from ``clock`` on, which may change at once.

        ``rate``: the learning rate, for those who take the step themselves.
        """

    def end(self, kind: MessageKind, clock: int) -> None:
        """End the work before the meeting."""

    def free(self) -> None:
        """Release the messages."""


def _codec(config: Config) -> Codec | None:
    """The codec of pushed gradients; ``None``: they are pushed as they are."""
    text = config.compress.codec
    return None if text == "none" else cast(Codec, parse(text))


class Clients:
    """A server's messages from and to the first worker of each group.

    Attributes:
        inbox: last message of each group; :meth:`pushed` has its numbers.
        outbox: last message to each group.
        sent: bytes of parameters sent, by clock.
    """

    def __init__(self, parts: Parts, members: Members) -> None:
        """Bind the messages, which have the size and type of this server's part."""
        parameters = parts.store.pieces[0].parameters
        wire, size, dtype = members.wire, parameters.size, parameters.dtype
        workers = members.roles.leaders()
        self._traffic, self._codec = traffic_of(parts.comm), _codec(parts.config)
        self._decoded: Array = np.empty(size if self._codec else 0, dtype)
        self.inbox = [_pushed(size, dtype, self._codec) for _ in workers]
        self.outbox = [ParameterMessage(size, dtype) for _ in workers]
        self.sent: Counter[int] = Counter()
        to = list(zip(workers, self.inbox, self.outbox, strict=True))
        self._receives = [wire.Recv_init(push.buffer, rank, _TAG) for rank, push, _ in to]
        self._sends = [wire.Send_init(reply.buffer, rank, _TAG) for rank, _, reply in to]

    def listen(self, worker: int) -> None:
        self._receives[worker].Start()

    def arrived(self, *, wait: bool) -> Sequence[int]:
        """The workers whose messages have come since the last call, at least one with ``wait``.

        All of them are returned at once, so that the caller, not MPI, chooses among them.
        """
        some = MPI.Request.Waitsome if wait else MPI.Request.Testsome
        return some(self._receives) or ()

    def pushed(self, worker: int) -> Array:
        """The gradient in a worker's inbox, of shape (elements,), until the next is asked for."""
        values = self.inbox[worker].values
        if self._codec is None:
            return values
        self._codec.decode(values, self._decoded)
        return self._decoded

    def answer(self, worker: int, kind: MessageKind, clock: int) -> None:
        """Send a worker its outbox."""
        message = self.outbox[worker]
        message.write(kind, clock)
        self.sent[clock] += message.nbytes
        self._traffic.send(1, message.nbytes)
        self._sends[worker].Start()

    def sending(self, worker: int) -> Array:
        """The numbers of a worker's outbox, after the last message has left."""
        self._sends[worker].Wait()  # at once: a worker asks again only when it has the message
        return self.outbox[worker].values

    def free(self) -> None:
        for send in self._sends:
            send.Wait()
        for request in (*self._receives, *self._sends):
            request.Free()


class Servers(ParameterExchange):
    """Messages of a group's first worker to and from each server."""

    def __init__(self, parts: Parts, members: Members) -> None:
        """Bind the messages; pulls replace the parameters of the worker's store."""
        super().__init__()
        spread = cast(WorkerStore, parts.store).spread
        wire, roles = members.wire, members.roles
        self._comm, self._traffic = parts.comm, traffic_of(parts.comm)
        self._parts, self._parameters = spread.parts, spread.flat
        self._codec = _codec(parts.config)
        #: Random numbers of the codec, for this group and the last clock of a push.
        self._dice = Dice(parts.config.run.seed, roles.group(parts.comm.rank))
        sizes, dtype = [part.stop - part.start for part in spread.parts], spread.flat.dtype
        self._pushed = [_pushed(size, dtype, self._codec) for size in sizes]
        self._pulled = [ParameterMessage(size, dtype) for size in sizes]
        self._asked = [ParameterMessage(0, dtype) for _ in sizes]
        servers = [roles.server(number) for number in range(roles.servers)]
        to = list(zip(servers, self._pushed, self._pulled, self._asked, strict=True))
        self._pushes = [wire.Send_init(push.buffer, rank, _TAG) for rank, push, _, _ in to]
        self._pulls = [wire.Recv_init(pull.buffer, rank, _TAG) for rank, _, pull, _ in to]
        self._asks = [wire.Send_init(ask.buffer, rank, _TAG) for rank, _, _, ask in to]

    def pull(self, clock: int) -> int | None:
        """Replace the parameters by the servers'; None: a server says stop."""
        MPI.Prequest.Startall(self._pulls)
        self._ask(MessageKind.PULL, clock)
        with self._comm.waiting("the parameters of the servers", by_all=False):
            MPI.Request.Waitall(self._pulls)
        kinds, clocks, _ = zip(*(message.header() for message in self._pulled), strict=True)
        if MessageKind.STOP in kinds:
            return None
        for part, message in zip(self._parts, self._pulled, strict=True):
            self._parameters[part] = message.values
        return max(clocks)

    def push(self, clock: int, clocks: int, gradient: Array, rate: float) -> None:
        """Send each server its part of a gradient, which may change at once.

        ``rate`` is not used: the servers have a rate of their own.
        """
        MPI.Request.Waitall(self._pushes)
        for part, message in zip(self._parts, self._pushed, strict=True):
            self._write(gradient[part], part.start, message, clock + clocks - 1)
            message.write(MessageKind.PUSH, clock, clocks)
            self._count(message, clock + clocks - 1)
        MPI.Prequest.Startall(self._pushes)

    def _write(self, gradient: Array, start: int, message: ParameterMessage, clock: int) -> None:
        if self._codec is None:
            message.values[...] = gradient
            return
        self._dice.step = clock
        self._codec.encode(gradient, message.values, lambda: self._dice.draw(start, 0))

    def _count(self, message: ParameterMessage, clock: int) -> None:
        self.sent[clock] += message.nbytes
        self._traffic.send(1, message.nbytes)

    def end(self, kind: MessageKind, clock: int) -> None:
        self._ask(kind, clock)
        with self._comm.waiting("the servers to take what was pushed", by_all=False):
            MPI.Request.Waitall([*self._asks, *self._pushes])

    def _ask(self, kind: MessageKind, clock: int) -> None:
        MPI.Request.Waitall(self._asks)
        for message in self._asked:
            message.write(kind, clock)
            self._count(message, clock)
        MPI.Prequest.Startall(self._asks)

    def free(self) -> None:
        for request in (*self._pushes, *self._pulls, *self._asks):
            request.Free()
