"""The blocking collectives, by MPI's names."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.calls.arguments import Arguments
from collectives.calls.engine import Engine

Asked = Algorithm | str | None
_NOTHING = np.empty(0)


class Blocking:
    """Each method returns when this rank's buffers are the caller's again.

    The buffers hold blocks.  All blocks of a call have as many items, unless the name of the method
    ends in ``v``: then counts say their lengths.

    =====================  ==================  ==================  =============================
    method                 ``sendbuf``         ``recvbuf``         in place
    =====================  ==================  ==================  =============================
    Allreduce, Scan,       1                   1                   ``sendbuf``, on all ranks
    Exscan
    Reduce_scatter,        ``size``            1                   ``sendbuf``, on all ranks;
    Reduce_scatter_block                                           ``recvbuf`` has ``size`` then,
                                                                   and the result in front
    Allgather, Allgatherv  1                   ``size``            ``sendbuf``, on all ranks: its
                                                                   block is the rank's place
    Alltoall, Alltoallv    ``size``            ``size``            ``sendbuf``, on all ranks
    Bcast                  1, the only buffer                      no
    Reduce                 1                   1, the root's       ``sendbuf`` of the root
    Gather, Gatherv        1                   ``size``, the       ``sendbuf`` of the root: its
                                               root's              block is its place
    Scatter, Scatterv      ``size``, the       1                   ``recvbuf`` of the root
                           root's
    Barrier                none                none                no
    =====================  ==================  ==================  =============================

    For in place, pass ``MPI.IN_PLACE`` or ``None`` in the buffer's stead.  Ranks other than the
    root pass ``None`` for a buffer that only the root has.  ``Reduce_scatter`` has blocks of
    ``recvcounts`` items.  Operations reduce item by item, so both buffers have one type.

    Raises:
        InvalidBuffer: on this rank alone, before the ranks meet: buffers, counts, a root or an
            operation cannot be; the call can be made again.
        UnknownAlgorithm: the collective has no such algorithm, or it cannot do this call.
        ScheduleError: on all ranks: a program's own algorithm is wrong.
        MismatchError: on all ranks, with ``check``, if their calls do not belong together.
        CorruptMessage: with :class:`~collectives.CheckedTransport`: a message has changed.
        CollectiveError: a collective was left in the middle on this rank before.
        MPI.Exception: the MPI library raises it, where the call is native.
    """

    _engine: Engine
    size: int

    def Allreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: Asked = None
    ) -> None:
        """Reduces ``sendbuf`` over all ranks into every rank's ``recvbuf``."""
        if self._engine.leaves_to_native(algorithm, "allreduce", recvbuf, sendbuf):
            return self._engine.library.Allreduce(self, sendbuf, recvbuf, op)
        return self._engine.run(Arguments("allreduce", sendbuf, recvbuf, op), algorithm)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: Asked = None
    ) -> None:
        """Reduces block j of every rank's ``sendbuf`` into rank j's ``recvbuf``."""
        if self._engine.leaves_to_native(
            algorithm, "reduce_scatter", recvbuf, sendbuf, blocks=self.size
        ):
            return self._engine.library.Reduce_scatter_block(self, sendbuf, recvbuf, op)
        return self._engine.run(Arguments("reduce_scatter", sendbuf, recvbuf, op), algorithm)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: Asked = None,
    ) -> None:
        """As :meth:`Reduce_scatter_block`, with ``recvcounts`` items for each rank; ``None``: its
        buffer says how many."""
        out_of_place = (
            recvcounts is not None and sendbuf is not MPI.IN_PLACE and sendbuf is not None
        )
        if out_of_place and self._engine.leaves_to_native(
            algorithm, "reduce_scatterv", sendbuf, recvbuf
        ):
            return self._engine.library.Reduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
        given = Arguments("reduce_scatter", sendbuf, recvbuf, op, 0, True, recvcounts)
        return self._engine.run(given, algorithm)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: Asked = None) -> None:
        """Gathers every rank's ``sendbuf`` into every rank's ``recvbuf``, in rank order."""
        if self._engine.leaves_to_native(algorithm, "allgather", recvbuf, sendbuf):
            return self._engine.library.Allgather(self, sendbuf, recvbuf)
        return self._engine.run(Arguments("allgather", sendbuf, recvbuf), algorithm)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: Asked = None) -> None:
        """Gathers blocks of unequal length from every rank into every rank's ``recvbuf``."""
        if self._engine.leaves_to_native(algorithm, "allgatherv", recvbuf, sendbuf):
            return self._engine.library.Allgatherv(self, sendbuf, recvbuf)
        return self._engine.run(Arguments("allgather", sendbuf, recvbuf, vector=True), algorithm)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: Asked = None) -> None:
        """Sends block j of ``sendbuf`` to rank j, and receives its block into place j."""
        if self._engine.leaves_to_native(algorithm, "alltoall", recvbuf, sendbuf):
            return self._engine.library.Alltoall(self, sendbuf, recvbuf)
        return self._engine.run(Arguments("alltoall", sendbuf, recvbuf), algorithm)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, *, algorithm: Asked = None) -> None:
        """Sends blocks of unequal length to every rank, and receives them."""
        if self._engine.leaves_to_native(algorithm, "alltoallv", recvbuf, sendbuf):
            return self._engine.library.Alltoallv(self, sendbuf, recvbuf)
        return self._engine.run(Arguments("alltoall", sendbuf, recvbuf, vector=True), algorithm)

    def Bcast(self, buf: Any, root: int = 0, *, algorithm: Asked = None) -> None:
        """Copies ``buf`` of rank ``root`` to every rank's."""
        if self._engine.leaves_to_native(algorithm, "broadcast", buf):
            return self._engine.library.Bcast(self, buf, root)
        return self._engine.run(Arguments("broadcast", MPI.IN_PLACE, buf, root=root), algorithm)

    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        algorithm: Asked = None,
    ) -> None:
        """Reduces ``sendbuf`` over all ranks into ``recvbuf`` of rank ``root``."""
        own, other = (recvbuf, None) if sendbuf is MPI.IN_PLACE else (sendbuf, recvbuf)
        if self._engine.leaves_to_native(algorithm, "reduce", own, other):
            return self._engine.library.Reduce(self, sendbuf, recvbuf, op, root)
        return self._engine.run(Arguments("reduce", sendbuf, recvbuf, op, root), algorithm)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: Asked = None) -> None:
        """Gathers every rank's ``sendbuf`` into ``recvbuf`` of rank ``root``."""
        own, other, blocks = sendbuf, recvbuf, self.size
        if own is MPI.IN_PLACE:  # at the root
            own, other, blocks = other, None, 1
        if self._engine.leaves_to_native(algorithm, "gather", own, other, blocks=blocks):
            return self._engine.library.Gather(self, sendbuf, recvbuf, root)
        return self._engine.run(Arguments("gather", sendbuf, recvbuf, root=root), algorithm)

    def Gatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: Asked = None
    ) -> None:
        """Gathers blocks of unequal length into ``recvbuf`` of rank ``root``."""
        own, other = (recvbuf, None) if sendbuf is MPI.IN_PLACE else (sendbuf, recvbuf)
        if self._engine.leaves_to_native(algorithm, "gatherv", own, other):
            return self._engine.library.Gatherv(self, sendbuf, recvbuf, root)
        given = Arguments("gather", sendbuf, recvbuf, root=root, vector=True)
        return self._engine.run(given, algorithm)

    def Scatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: Asked = None
    ) -> None:
        """Sends block j of ``sendbuf`` of rank ``root`` to rank j's ``recvbuf``."""
        own, other, blocks = recvbuf, sendbuf, self.size
        if own is MPI.IN_PLACE:  # at the root
            own, other, blocks = other, None, 1
        if self._engine.leaves_to_native(algorithm, "scatter", own, other, blocks=blocks):
            return self._engine.library.Scatter(self, sendbuf, recvbuf, root)
        return self._engine.run(Arguments("scatter", sendbuf, recvbuf, root=root), algorithm)

    def Scatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: Asked = None
    ) -> None:
        """Sends blocks of unequal length of rank ``root`` to all ranks."""
        own, other = (sendbuf, None) if recvbuf is MPI.IN_PLACE else (recvbuf, sendbuf)
        if self._engine.leaves_to_native(algorithm, "scatterv", own, other):
            return self._engine.library.Scatterv(self, sendbuf, recvbuf, root)
        given = Arguments("scatter", sendbuf, recvbuf, root=root, vector=True)
        return self._engine.run(given, algorithm)

    def Scan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: Asked = None
    ) -> None:
        """Reduces ``sendbuf`` over the ranks up to this one into ``recvbuf``."""
        if self._engine.leaves_to_native(algorithm, "scan", recvbuf, sendbuf):
            return self._engine.library.Scan(self, sendbuf, recvbuf, op)
        return self._engine.run(Arguments("scan", sendbuf, recvbuf, op), algorithm)

    def Exscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: Asked = None
    ) -> None:
        """Reduces ``sendbuf`` over the ranks before this one; rank 0's ``recvbuf`` stays."""
        if self._engine.leaves_to_native(algorithm, "exscan", recvbuf, sendbuf):
            return self._engine.library.Exscan(self, sendbuf, recvbuf, op)
        return self._engine.run(Arguments("exscan", sendbuf, recvbuf, op), algorithm)

    def Barrier(self, *, algorithm: Asked = None) -> None:
        """Returns when every rank has called it."""
        if self._engine.leaves_to_native(algorithm, "barrier", _NOTHING):
            return self._engine.library.Barrier(self)
        # The reduction of a byte that nobody looks at.
        mine, total = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        return self._engine.run(Arguments("barrier", mine, total, MPI.BOR), algorithm)
