"""Activations and gradients between stages: shapes agreed once, sends that nobody waits for."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpitrain.nn import Array, Shape, array_namespace


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

    def __init__(self, comm: MPI.Intracomm, expected: Sequence[Expected], xp: Any = np) -> None:
        """``xp``: where received arrays are to be; others than NumPy's pass through the host."""
        self._comm = comm
        self._xp = xp
        self._expected = deque(expected)
        self._posted: deque[tuple[MPI.Request, Array]] = deque()
        self._sent: list[tuple[MPI.Request, Array]] = []
        self._post()

    def receive(self) -> Array:
        """The next of the expected messages."""
        request, array = self._posted.popleft()
        request.Wait()
        self._post()
        return array if self._xp is np else self._xp.asarray(array)

    def send(self, array: Array, target: int, tag: int) -> None:
        """Send without waiting; the array must not change afterwards."""
        host = array if array_namespace(array) is np else array.get()  # type: ignore[attr-defined]
        host = np.ascontiguousarray(host)
        request = self._comm.Isend(_bytes(host), target, tag)
        self._sent = [(r, a) for r, a in self._sent if not r.Test()]
        self._sent.append((request, host))

    def finish(self) -> None:
        """Wait for what was sent."""
        MPI.Request.Waitall([request for request, _ in self._sent])
        self._sent.clear()

    def _post(self) -> None:
        while self._expected and len(self._posted) < self._AHEAD:
            source, tag, samples, spec = self._expected.popleft()
            array = np.empty((samples, *spec.shape), spec.dtype)
            self._posted.append((self._comm.Irecv(_bytes(array), source, tag), array))


def _bytes(array: Array) -> list[Any]:
    return [array.reshape(-1).view(np.uint8), MPI.BYTE]
