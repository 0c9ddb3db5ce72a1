"""Activations and gradients between stages: shapes agreed once, sends that nobody waits for."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.transport import Bytes
from collectives.execution.transport.checked import Sealed
from mpitrain.arrays import Array, Shape, array_namespace


class Spec(NamedTuple):
    """Shape of one sample of an activation, and its type."""

    shape: Shape
    dtype: np.dtype[Any]


class Expected(NamedTuple):
    """A message to come.

    Attributes:
        source: rank.
        tag: of the edge that it comes along.
        samples: in the micro-batch.
        spec: of one of them.
    """

    source: int
    tag: int
    samples: int
    spec: Spec


class Mailbox:
    """The messages of one rank in one run of a schedule.

    Receives are posted a few ahead in the order in which the schedule needs them, so that a message
    arrives while the rank computes; sends are kept until they are done.
    """

    _AHEAD = 2

    def __init__(self, comm: Communicator, expected: Sequence[Expected], xp: Any = np) -> None:
        """``xp``: where received arrays are to be; others than NumPy's pass through the host."""
        self._comm = comm
        self._seals = comm.checks_messages
        self._xp = xp
        self._expected = deque(expected)
        self._posted: deque[tuple[MPI.Request, Array, int, Sealed | None]] = deque()
        self._sent: list[tuple[MPI.Request, Array, Sealed | None]] = []
        self._post()

    @property
    def next_source(self) -> int:
        """The rank that sends the next of the expected messages."""
        return self._posted[0][2]

    def receive(self) -> Array:
        """The next of the expected messages.

        Raises:
            CorruptMessage: it arrived changed, where messages carry checksums.
        """
        request, array, source, sealed = self._posted.popleft()
        with self._comm.waiting(f"activation from rank {source}", by_all=False):
            request.Wait()
        if sealed:
            sealed.check(self._comm, source)
            sealed.free()
        self._post()
        return array if self._xp is np else self._xp.asarray(array)

    def send(self, array: Array, target: int, tag: int) -> None:
        """Send without waiting; the array must not change afterwards."""
        host = array if array_namespace(array) is np else array.get()  # type: ignore[attr-defined]
        host = np.ascontiguousarray(host)
        sealed = Sealed(_bytes(host)) if self._seals else None
        if sealed:
            sealed.seal()
        message = sealed.message if sealed else [_bytes(host), MPI.BYTE]
        request = self._comm.Isend(message, target, tag)
        self._sent = [entry for entry in self._sent if not _gone(*entry)]
        self._sent.append((request, host, sealed))

    def finish(self) -> None:
        """Wait for what was sent."""
        with self._comm.waiting("activations to leave", by_all=False):
            MPI.Request.Waitall([request for request, _, _ in self._sent])
        for _, _, sealed in self._sent:
            if sealed:
                sealed.free()
        self._sent.clear()

    def _post(self) -> None:
        while self._expected and len(self._posted) < self._AHEAD:
            source, tag, samples, spec = self._expected.popleft()
            array = np.empty((samples, *spec.shape), spec.dtype)
            sealed = Sealed(_bytes(array)) if self._seals else None
            message = sealed.message if sealed else [_bytes(array), MPI.BYTE]
            request = self._comm.Irecv(message, source, tag)
            self._posted.append((request, array, source, sealed))


def _gone(request: MPI.Request, array: Array, sealed: Sealed | None) -> bool:
    """Whether a message has been sent; what belongs to it is released then."""
    if not request.Test():
        return False
    if sealed:
        sealed.free()
    return True


def _bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)
