"""Buffers in shared memory that are given out by turns."""

import logging
import weakref
from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.calls.buffer_protocols import read_shape, read_type
from collectives.communicator import Communicator
from collectives.execution.transport import Bytes

log = logging.getLogger("collectives")


class SharedPool:
    """Arrays of :meth:`~collectives.Communicator.empty` for programs that want a new buffer in each
    call, as FSDP2's custom all-gather does.

    >>> pool = SharedPool(comm)                           # doctest: +SKIP
    >>> whole = pool.take((comm.size, 1000), np.float32)  # doctest: +SKIP

    There is a ring of buffers for each number of bytes.  An array is taken back when the last view
    of it is gone, tensors of torch included.  The memory goes with the pool and the last array.

    Args:
        comm: the communicator whose collectives get the arrays.
        buffers: buffers of each ring.
        limit: bytes of all rings on this rank; sizes that come later get ordinary memory, and the
            log says so.  Like ``buffers``, it must be the same on all ranks.
    """

    def __init__(self, comm: Communicator, buffers: int = 2, limit: int = 1 << 30) -> None:
        self._comm = comm
        self._buffers = buffers
        self._left = limit
        self._rings: dict[int, deque[_Buffer]] = {}

    def take(self, shape: Any, dtype: Any = np.uint8) -> npt.NDArray[Any]:
        """An array with whatever a user before left in it.

        It is ordinary memory where the ring's next buffer is still in use on this rank: other ranks
        need not know.  The first call for a number of bytes is collective, so all ranks take arrays
        of the same numbers of bytes in the same order.  Later calls communicate nothing.

        Cost: 4 us; the first call for a number of bytes, that of :meth:`Communicator.empty`.

        Args:
            shape, dtype: as of :meth:`~collectives.Communicator.empty`; a number of bytes alone.

        Raises:
            InvalidBuffer: on this rank: this is no shape, or no type that processes can share.
            MemoryError: on all ranks: their node has less memory than all of them ask for.
            CollectiveError: a collective was left in the middle on this rank before.
        """
        kind = read_type(dtype)
        lengths = read_shape(shape, kind)
        nbytes = prod(lengths) * kind.itemsize
        ring = self._rings.get(nbytes)
        if ring is None:
            ring = self._rings[nbytes] = self._ring(nbytes)
        if not ring:
            return np.empty(lengths, kind)
        ring.rotate()
        array = ring[0].array()
        return np.empty(lengths, kind) if array is None else array.view(kind).reshape(lengths)

    def _ring(self, nbytes: int) -> "deque[_Buffer]":
        """The buffers of a size; none where its arrays are ordinary memory.  Collective."""
        if not nbytes or nbytes * self._buffers > self._left:
            log.info("ordinary memory in a pool: %d bytes, %d are left", nbytes, self._left)
            return deque()
        pitch = -(-nbytes // _LINE) * _LINE
        rows = self._comm.empty((self._buffers, pitch), np.uint8)
        self._left -= nbytes * self._buffers
        return deque(_Buffer(row[:nbytes]) for row in rows)


#: A cache line, at which each buffer begins, in bytes.
_LINE = 64


class _Buffer:
    """Memory of one array at a time."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory.data
        self._user: weakref.ref[Bytes] | None = None

    def array(self) -> Bytes | None:
        """The memory as a new array; ``None`` while a view of the last one is there."""
        if self._user is not None and self._user() is not None:
            return None
        array = np.frombuffer(self._memory, np.uint8)  # all views of it have it for their base
        self._user = weakref.ref(array)
        return array
