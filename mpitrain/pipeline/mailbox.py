"""Messages with activations and gradients between stages."""

from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.transport import Bytes
from collectives.execution.transport.mpi import Envelope
from collectives.execution.waiting import give_way
from mpitrain.arrays import Array, Shape
from mpitrain.device import HOST, Device, Later
from mpitrain.fields import marked, marks, unused


class Spec(NamedTuple):
    """Shape of one sample of an activation, and its type."""

    shape: Shape
    dtype: np.dtype[Any]


class Expected(NamedTuple):
    """A message to come.

    Attributes:
        source: the sending rank.
        tag: tag of the edge between the stages.
        samples: number of samples in the micro-batch.
        spec: shape and type of one sample.
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


class Mailbox:
    """The messages of one rank in one run of a schedule.

    Receives are posted a few ahead in the order in which the schedule needs them, so that a message
    arrives while the rank computes; sends are kept until they are done.
    """

    _AHEAD = 2

    def __init__(
        self, comm: Communicator, expected: Sequence[Expected], device: Device = HOST
    ) -> None:
        """``device``: device of the arrays; a GPU's pass through pinned memory."""
        self._comm = comm
        self._wraps = comm.checks_messages or comm.delays_messages
        self._device = device
        self._expected = deque(expected)
        self._leaving: deque[_Letter] = deque()
        self._leave_alone: Callable[[], None] | None = None
        #: Set by :meth:`Communicator.attend`.
        self.among: list[Any] = []
        self._posted: deque[tuple[MPI.Request, Array, Array, int, Envelope | None]] = deque()
        self._sent: list[tuple[MPI.Request, Array, Envelope | None]] = []
        self._post()

    @property
    def next_source(self) -> int:
        """The rank that sends the next of the expected messages."""
        return self._posted[0][3]

    def receive(self) -> Array:
        """The next of the expected messages.

        Raises:
            CorruptMessage: it arrived changed, where messages carry checksums.
        """
        request, array, tail, source, sealed = self._posted.popleft()
        with self._comm.waiting(f"activation from rank {source}", by_all=False):
            while not self.Test() and not request.Test():
                give_way()
            request.Wait()
            if sealed:
                sealed.check(self._comm, source)
                sealed.free()
        self._post()
        if tail.any():
            array = marked(array, tail)
        return self._device.put(array)

    def send(self, array: Array, target: int, tag: int, *, is_gradient: bool = False) -> None:
        """Send without waiting; the array must not change afterwards."""
        # A checksum, or a time, is at the end of a message, which then has its full length.
        tail = marks(array) if is_gradient and (self._wraps or unused(array)) else None
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
        data = _bytes(np.ascontiguousarray(letter.array.get()))
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
        while self._expected and len(self._posted) < self._AHEAD:
            source, tag, samples, spec, is_gradient = self._expected.popleft()
            size = samples * prod(spec.shape) * spec.dtype.itemsize
            fields = len(spec.dtype.names or ("",)) if is_gradient else 0
            data = np.empty(size + fields, np.uint8)
            array, tail = data[:size].view(spec.dtype).reshape(samples, *spec.shape), data[size:]
            tail[:] = 0
            sealed = self._comm.envelope(data)
            request = self._comm.Irecv(sealed.message if sealed else [data, MPI.BYTE], source, tag)
            self._posted.append((request, array, tail, source, sealed))


def _gone(request: MPI.Request, array: Array, sealed: Envelope | None) -> bool:
    """Whether a message has been sent; its envelope is released then."""
    if not request.Test():
        return False
    if sealed:
        sealed.free()
    return True


def _bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)
