"""A group's large collectives: through memory that its ranks share, where they are on one node, and
beside the program, where each is on a host of its own."""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.shared_pool import SharedPool
from collectives.torch.order import Order
from collectives.torch.roots import Roots
from collectives.torch.tensors import SMALL

#: Sums of one storage after which it is moved: DDP makes its buckets anew after the first step.
_SUMS = 2
#: Bytes in which numbers of 16 bits are widened, piece by piece: they stay in the cache.
_ROOM_BYTES = 1 << 20
#: Bytes of a group's pool on each rank.
_POOL_BYTES = 3 << 26
#: Bytes of a rank's block from which a call between hosts takes the ring.
_FAR_BYTES = 256 << 10


class GroupMemory:
    """The shared memory of one group, and the way of its large calls.

    Shared memory has a communicator of its own, as calls on one with it take longer where they are
    small.  With one rank on each host, large calls take the ring: it sends as little as any, and
    waits with yields.  The MPI library's own calls poll, and take the core from a backward pass
    that runs beside them.

    Making it is collective; all but :meth:`take` runs where the group's collectives run.

    Args:
        comm: the group's communicator.
        order: the order of its collectives.
        record: makes a collective, and records it under a name.
    """

    def __init__(self, comm: Communicator, order: Order, record: Callable[..., None]) -> None:
        self._comm, self._order, self._record = comm, order, record
        self._near: Communicator | None = None
        is_far = comm.ranks_per_node == 1 < comm.size
        self._ring_from = comm.size * _FAR_BYTES if is_far else sys.maxsize
        self._pool: SharedPool | None = None
        self._taken: set[int] = set()
        self._guard = threading.Lock()
        self._room: torch.Tensor | None = None
        if 1 < comm.size == comm.ranks_per_node:
            self._near = comm.Dup()
            self._near.prepare()
            self._pool = SharedPool(self._near, limit=_POOL_BYTES)
        self._sums: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def way(self, nbytes: int) -> tuple[Communicator, str | None]:
        """Communicator and algorithm of a call of so many bytes, the same number on all ranks."""
        if self._near is not None and nbytes > SMALL:
            return self._near, None
        return self._comm, "ring" if nbytes >= self._ring_from else None

    def close(self) -> None:
        """Frees the communicator.  Collective."""
        if self._near is not None:
            self._near.Free()
        self._near = self._pool = None

    def take(self, items: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in shared memory where that can be, with whatever is in it.

        All ranks call it in the same order among the group's collectives.
        """
        nbytes, pool = items * dtype.itemsize, self._pool
        if pool is None or not nbytes:
            return torch.empty(items, dtype=dtype)
        made: list[np.ndarray[Any, Any]] = []

        def take() -> None:
            with self._guard:
                made.append(pool.take(nbytes))

        if nbytes in self._taken:
            take()
        else:  # it is collective
            self._order.now(self._record, "shared memory", take)
            self._taken.add(nbytes)
        return torch.frombuffer(made[0], dtype=dtype)

    def room(self, items: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the wider form of numbers, or for a piece of them.  Collective at first use.

        A large one is kept: new pages take longer than what is done in them.
        """
        if items * dtype.itemsize <= SMALL:
            return torch.empty(items, dtype=dtype)
        if self._room is None:
            with torch.inference_mode(False):  # calls outside of that mode write to it, too
                self._room = self.take(_ROOM_BYTES, torch.uint8)
        return self._room.view(dtype)

    def meet(self, tensor: torch.Tensor, is_bucket: bool, roots: Roots) -> None:
        """Lets the ranks meet for a large sum, and moves a bucket of DDP's that comes again into
        shared memory, if it is one on all ranks.  Collective.

        Args:
            is_bucket: whether it is one on this rank.
            roots: the roots of the group's calls, which the ranks compare here.

        Raises:
            MismatchError: on all ranks: they differ.
        """
        if self._near is None:
            return
        storage = tensor.untyped_storage() if is_bucket else None
        if storage is not None and not storage.resizable():  # NumPy has a view of it
            storage = None
        sums = 0 if storage is None else self._sums.get(storage, 0)
        told = roots.told(sums == _SUMS)
        everybody = MPI.Intracomm.Iallreduce(self._comm, MPI.IN_PLACE, told, MPI.MIN)
        self._near._engine.resources.wait(everybody)  # MPI's own wait takes the program's core
        roots.check(told)
        if storage is not None:
            self._sums[storage] = sums + 1
        if told[-1]:
            assert storage is not None, "it is a bucket on all ranks"
            with self._near._engine.changing_memory("moving a bucket"):
                self._near._engine.resources.move(storage)
            # torch then refuses to resize what it has moved, in which it would crash.
            torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def is_called_by_reducer() -> bool:
    """Whether C++ code of torch's backward pass has called this package, as DDP's reducer does.

    While it waits, nobody else has its buckets, whose memory moves; those of other callers may be
    in use.
    """
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("collectives."):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"
