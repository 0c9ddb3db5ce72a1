"""Messages with activations and gradients between stages."""

from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator, Envelope, give_way
from mpitrain.arrays import Array, Shape
from mpitrain.device import HOST, Device, Later
from mpitrain.fields import marked, marks, resized, sizes, unused


class Spec(NamedTuple):
    """Shape of one sample of an activation, and its type."""

    shape: Shape
    dtype: np.dtype[Any]


class Expected(NamedTuple):
    """A message to come, of some samples of a micro-batch.

    Attributes:
        tag: tag of the edge between the stages.
        is_gradient: whether it is a gradient, with a byte at the end for each field, which marks it
            as unused.
    """

    source: int
    tag: int
    samples: int
    spec: Spec
    is_gradient: bool = False


class _Letter(NamedTuple):
    """A message whose array is on its way to the host."""

    array: Later
    tail: Array | None
    target: int
    tag: int


class _Coming(NamedTuple):
    """A message whose receive is posted."""

    request: MPI.Request
    data: Array
    expected: Expected
    sealed: Envelope | None


class Mailbox:
    """The messages of one rank in one run of a schedule.

    Receives are posted a few ahead in the order in which the schedule needs them, so that a message
    arrives while the rank computes; sends are kept until they are done.  Messages of sizes that
    vary say them at their end, and are received when they are needed.
    """

    _AHEAD = 2

    def __init__(
        self, comm: Communicator, expected: Sequence[Expected], device: Device = HOST, *,
        varies: bool = False,
    ) -> None:  # fmt: skip
        """Post the first receives of the messages to come, in the order of :meth:`receive`.

        Arrays of a GPU pass through pinned memory.  ``varies``: samples may have other sizes than
        those expected.
        """
        self._comm = comm
        self._varies = varies
        self._wraps = comm.checks_messages or comm.delays_messages
        #: Bytes of the number behind those of a message.
        self._behind = 0
        if varies and (sealed := comm.envelope(np.empty(0, np.uint8))):
            self._behind = sealed.number.nbytes
            sealed.free()
        self._device = device
        self._expected = deque(expected)
        self._leaving: deque[_Letter] = deque()
        self._leave_alone: Callable[[], None] | None = None
        #: Set by :meth:`Communicator.attend`.
        self.among: list[Any] = []
        self._posted: deque[_Coming] = deque()
        self._sent: list[tuple[MPI.Request, Array, Envelope | None]] = []
        self._post()

    @property
    def next_source(self) -> int:
        """The rank that sends the next of the expected messages."""
        return (self._posted[0].expected if self._posted else self._expected[0]).source

    def receive(self) -> Array:
        """The next of the expected messages.

        Raises:
            CorruptMessage: it arrived changed, where messages carry checksums.
        """
        with self._comm.waiting(f"activation from rank {self.next_source}", by_all=False):
            coming = self._posted.popleft() if self._posted else self._found()
            while not self.Test() and not coming.request.Test():
                give_way()
            coming.request.Wait()
            if coming.sealed:
                coming.sealed.check(self._comm, coming.expected.source)
                coming.sealed.free()
        self._post()
        return self._device.put(self._array(coming.data, coming.expected))

    def _array(self, data: Array, expected: Expected) -> Array:
        """The array of a message."""
        shape, kind = expected.spec
        rest = len(data)
        if self._varies:
            rest -= 8 * len(sizes(kind, shape))
            kind, shape = resized(kind, shape, data[rest:].view(np.int64).tolist())
        size = expected.samples * prod(shape) * kind.itemsize
        array, tail = data[:size].view(kind).reshape(expected.samples, *shape), data[size:rest]
        return marked(array, tail) if tail.any() else array

    def send(self, array: Array, target: int, tag: int, *, is_gradient: bool = False) -> None:
        """Send without waiting; the array must not change afterwards."""
        # A checksum, or a time, is at the end of a message, which then has its full length.
        is_full = self._wraps or self._varies
        tail = marks(array) if is_gradient and (is_full or unused(array)) else None
        if self._varies:
            own = np.array(sizes(array.dtype, array.shape[1:]), np.int64).view(np.uint8)
            tail = own if tail is None else np.concatenate([tail, own])
        self._leaving.append(_Letter(self._device.bring(array), tail, target, tag))
        if not self.Test() and self._leave_alone is None:
            self._leave_alone = self._comm.attend(self)

    def Test(self) -> bool:
        """Start messages whose arrays are on the host, in order; returns whether all have started.

        Other ranks may wait for them while this rank waits elsewhere: see ``Communicator.attend``.
        """
        while self._leaving and self._leaving[0].array.done:
            self._start(self._leaving.popleft())
        if self._leaving:
            return False
        if self._leave_alone is not None:
            self._leave_alone()
            self._leave_alone = None
        return True

    def abandon(self) -> None:
        """Give up messages that have not started."""
        self._leaving.clear()
        self.Test()

    def flush(self, progress: Callable[[], None]) -> None:
        """Wait until all messages have started; meanwhile, ``progress`` moves other work along."""
        while not self.Test():
            progress()
            give_way()

    def _start(self, letter: "_Letter") -> None:
        data = np.ascontiguousarray(letter.array.get()).reshape(-1).view(np.uint8)
        if letter.tail is not None:
            data = np.concatenate([data, letter.tail])
        sealed = self._comm.envelope(data)
        if sealed:
            sealed.seal()
        message = sealed.message if sealed else [data, MPI.BYTE]
        request = self._comm.Isend(message, letter.target, letter.tag)
        self._sent = [entry for entry in self._sent if not _gone(*entry)]
        self._sent.append((request, data, sealed))

    def finish(self) -> None:
        """Wait for the messages that were sent."""
        with self._comm.waiting("activations to leave", by_all=False):
            self.flush(lambda: None)
            MPI.Request.Waitall([request for request, _, _ in self._sent])
        for _, _, sealed in self._sent:
            if sealed:
                sealed.free()
        self._sent.clear()

    def _post(self) -> None:
        while self._expected and len(self._posted) < self._AHEAD and not self._varies:
            expected = self._expected.popleft()
            shape, kind = expected.spec
            fields = len(kind.names or ("",)) if expected.is_gradient else 0
            size = expected.samples * prod(shape) * kind.itemsize
            data = np.empty(size + fields, np.uint8)
            data[size:] = 0
            self._posted.append(self._coming(expected, data))

    def _found(self) -> "_Coming":
        """The next message, whose size shows when it is there."""
        expected, status = self._expected.popleft(), MPI.Status()
        where = expected.source, expected.tag
        while not self.Test() or (message := self._comm.Improbe(*where, status)) is None:
            give_way()
        data = np.empty(status.Get_count(MPI.BYTE) - self._behind, np.uint8)
        return self._coming(expected, data, message)

    def _coming(
        self, expected: Expected, data: Array, message: MPI.Message | None = None
    ) -> "_Coming":
        sealed = self._comm.envelope(data)
        buffer = sealed.message if sealed else [data, MPI.BYTE]
        if message is not None:
            request = message.Irecv(buffer)
        else:
            request = self._comm.Irecv(buffer, expected.source, expected.tag)
        return _Coming(request, data, expected, sealed)


def _gone(request: MPI.Request, array: Array, sealed: Envelope | None) -> bool:
    """Whether a message has been sent; its envelope is released then."""
    if not request.Test():
        return False
    if sealed:
        sealed.free()
    return True
