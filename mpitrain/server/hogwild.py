"""Hogwild: one copy of the parameters in the node's memory, that all ranks update without locks.

Niu, Recht, Re & Wright, Hogwild!: a lock-free approach to parallelizing stochastic gradient descent
(2011).  A rank computes on the copy as it is, while others change it, and then subtracts its
gradient, number by number: a load, a subtraction, a store.  Aligned numbers of 4 and 8 bytes are
loaded and stored whole, so that no number is ever a mixture of two; but of two ranks that change
the same number at the same time, one may store over the other, whose change is lost.  Where
gradients are sparse, as an embedding table's, this is rare.  The layers behind the tables have
dense gradients; with ``hogwild = "tables"`` these are summed over the ranks in each step, and only
the tables are without locks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.group import share
from mpitrain.kernels import square_sum
from mpitrain.parallel.arena import DATA, SPREAD
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.parallel.store import Piece, Reduction
from mpitrain.parallel.summation import Dense
from mpitrain.server.messages import MessageKind, ParameterExchange
from mpitrain.server.roles import Members
from mpitrain.training.parts import Parts


class NodeCopy(WholeGradients):
    """All parameters once, in a shared window of MPI, and each rank's own gradients.

    Attributes:
        flat: the copy, of shape (elements,), which other ranks change at any time.
        pieces: the part of the copy that this rank saves.
    """

    def __init__(self, parts: Parts, initial: Array, members: Members) -> None:
        """Allocate the window for the parameters, which are ``initial``, flat; collective.

        Raises:
            ConfigError: on all ranks; they cannot address one memory.
        """
        comm, arena, self.members = parts.comm, parts.arena, members
        sums_rest = parts.config.server.hogwild == "tables"
        self._node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self._alone = comm.Split(comm.rank)
        rest = comm if sums_rest else self._alone
        how = Dense(parts.config.parallel.algorithm)
        reduction = Reduction({DATA: rest, SPREAD: self._alone}, how)
        super().__init__(arena, reduction, np.zeros(arena.size, initial.dtype))
        if comm.allreduce(self._node.size, op=MPI.MIN) < comm.size:
            raise ConfigError(
                "server.hogwild: the ranks are on several nodes, or cannot open one another's "
                "memory; start all of them on one node, or set hogwild = false"
            )
        nbytes = initial.nbytes if comm.rank == 0 else 0
        self._window = MPI.Win.Allocate_shared(nbytes, initial.itemsize, comm=self._node)
        memory: Any = self._window.Shared_query(0)[0]
        bytes_: Array = np.frombuffer(memory, np.uint8)
        self.flat: Array = bytes_[: initial.nbytes].view(initial.dtype)
        self._window.Lock_all()
        if comm.rank == 0:
            self.flat[...] = initial
        self.views = arena.views(self.flat)
        self.publish()
        for bucket in self.buckets:
            own = share(bucket.stop - bucket.start, comm.rank, comm.size)
            start, part = bucket.start + own.start, self.flat[bucket.start : bucket.stop][own]
            self.pieces.append(Piece(start, part, np.zeros_like(part), bucket.group))
        if sums_rest:
            self.bind_sums()
        summed = f", the rest summed by {self.algorithm}" if sums_rest else ""
        self.algorithm, self.reason = "Hogwild", f"one copy, without locks{summed}"

    def publish(self) -> None:
        """Show the stores of each rank to all; collective."""
        self.meet(False)

    def meet(self, failed: bool) -> bool:
        """Show the stores of each rank to all; whether one has ``failed``.  Collective."""
        self._window.Sync()
        has_failed = bool(self._node.allreduce(failed, op=MPI.LOR))
        self._window.Sync()
        return has_failed

    def close(self) -> None:
        super().close()
        # The window's memory goes with it.
        self.views, self.pieces, self.flat = [], [], np.empty(0)
        self._window.Unlock_all()
        self._window.Free()
        self._alone.Free()
        self._node.Free()


class Unlocked(ParameterExchange):
    """Updates the one copy of the parameters in place, instead of pulling and pushing."""

    def __init__(self, flat: Array) -> None:
        super().__init__()
        self._flat = flat

    def push(self, clock: int, clocks: int, gradient: Array, rate: float) -> None:
        """Take a step along the gradient without a lock, in the elements where it is not 0."""
        self.push_part(0, gradient, rate)

    def push_part(self, start: int, gradient: Array, rate: float) -> None:
        """Take a step in the elements from ``start`` on."""
        index = np.flatnonzero(gradient)
        step = gradient[index]
        step *= rate
        self._flat[start + index] -= step


class HogwildTables(Unlocked):
    """Updates tables without locks, and the rest together: all ranks meet before each batch.

    A dense gradient is there on all ranks as soon as nobody computes on the parameters any more;
    then each rank updates its pieces of them, and the next batch begins when all have.
    """

    def __init__(self, store: NodeCopy, begins: Callable[[int], None]) -> None:
        """``begins``: called before each batch with its number; it may raise."""
        super().__init__(store.flat)
        self._store, self._begins = store, begins
        self._tables = [t for t in store.arena.tensors if t.group == SPREAD]
        self._pieces = [piece for piece in store.pieces if piece.group != SPREAD]
        self._has_ended = False

    def pull(self, clock: int) -> int | None:
        """Wait until all ranks have made their updates; None: one has failed."""
        self._begins(clock)
        self._has_ended = self._store.meet(False)
        return None if self._has_ended else clock

    def push(self, clock: int, clocks: int, gradient: Array, rate: float) -> None:
        """Take a step along the gradient, without a lock in tables, else in the own pieces."""
        squares = 0.0
        for table in self._tables:
            own = gradient[table.start : table.stop]
            self.push_part(table.start, own, rate)
            squares += square_sum(own)
        for piece in self._pieces:
            own = gradient[piece.start : piece.stop]
            piece.parameters[...] -= rate * own
            squares += square_sum(own)
        self.squares[clock] = squares

    def end(self, kind: MessageKind, clock: int) -> None:
        """End the work; the others hear of a failure where they meet next."""
        if not self._has_ended:
            self._store.meet(kind is MessageKind.FAILED)
