"""Hogwild: one copy of the parameters in the node's memory, that all ranks update without locks.

Niu, Recht, Re & Wright, Hogwild!: a lock-free approach to parallelizing stochastic gradient descent
(2011).  A rank computes on the copy as it is, while others change it, and then subtracts its
gradient, number by number: a load, a subtraction, a store.  Aligned numbers of 4 and 8 bytes are
loaded and stored whole, so that no number is ever a mixture of two; but of two ranks that change
the same number at the same time, one may store over the other, whose change is lost.  Where
gradients are sparse, as an embedding table's, this is rare.
"""

from collections import Counter
from time import perf_counter
from typing import cast

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arena import DATA, OWN, Arena
from mpitrain.arrays import Array, Parameters
from mpitrain.config import ConfigError
from mpitrain.group import TensorGroup, share
from mpitrain.parallel.store import Piece, Reduction, Store
from mpitrain.parallel.summation import Dense
from mpitrain.parallel.whole import WholeGradients
from mpitrain.server.order import Order
from mpitrain.server.roles import Roles
from mpitrain.server.trainer import ServedTrainer
from mpitrain.server.wire import Kind
from mpitrain.server.work import Exchange


class NodeCopy(WholeGradients):
    """All parameters once, in a shared window of MPI, and each rank's own gradients.

    Attributes:
        flat: the copy, of shape (elements,), which other ranks change at any time.
        pieces: the part of the copy that this rank saves.
    """

    def __init__(self, comm: Communicator, arena: Arena, initial: Array) -> None:
        """Allocate the window; collective.

        Raises:
            ConfigError: on all ranks; they cannot address one memory.
        """
        self._node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self._alone = comm.Split(comm.rank)
        reduction = Reduction({DATA: self._alone, OWN: self._alone}, Dense())
        super().__init__(arena, reduction, np.zeros(arena.size, initial.dtype))
        if comm.allreduce(self._node.size, op=MPI.MIN) < comm.size:
            raise ConfigError(
                "server.hogwild: the ranks are on several nodes, or cannot open one another's "
                "memory; start all of them on one node, or set hogwild = false"
            )
        self._window = MPI.Win.Allocate_shared(
            initial.nbytes if comm.rank == 0 else 0, initial.itemsize, comm=self._node
        )
        memory, _ = self._window.Shared_query(0)
        bytes_: Array = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
        self.flat: Array = bytes_[: initial.nbytes].view(initial.dtype)
        self._window.Lock_all()
        self._views = arena.views(self.flat)
        if comm.rank == 0:
            self.flat[...] = initial
        self.publish()
        self.pieces = []
        for bucket in self.buckets:
            own = share(bucket.stop - bucket.start, comm.rank, comm.size)
            start, part = bucket.start + own.start, self.flat[bucket.start : bucket.stop][own]
            self.pieces.append(Piece(start, part, np.zeros_like(part), bucket.group))

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def publish(self) -> float:
        """What each rank has stored, all of them see; collective."""
        start = perf_counter()
        self._window.Sync()
        self._node.Barrier()
        self._window.Sync()
        return perf_counter() - start

    def close(self) -> None:
        super().close()
        # The window's memory goes with it.
        self._views, self.pieces, self.flat = [], [], np.empty(0)
        self._window.Unlock_all()
        self._window.Free()
        self._alone.Free()
        self._node.Free()


class Unlocked:
    """What a worker of the one copy does in the place of pulls and pushes."""

    def __init__(self, flat: Array) -> None:
        """``flat``: the copy."""
        self.sent: Counter[int] = Counter()
        self._flat = flat

    def pull(self, clock: int) -> bool:
        """The parameters are where they are."""
        return True

    def push(self, clock: int, clocks: int, gradient: Array, rate: float) -> None:
        """A step along the gradient, in the numbers where it is not 0, without a lock."""
        index = np.flatnonzero(gradient)
        step = gradient[index]
        step *= rate
        self._flat[index] -= step

    def end(self, kind: Kind, clock: int) -> None:
        """Nothing is on its way."""

    def free(self) -> None:
        """It has nothing of its own."""


class HogwildTrainer(ServedTrainer):
    """Trains a recommender on ranks of one node that update one copy of it without locks.

    A worker's batch, meetings, tests and checkpoints are those of :class:`ServedTrainer`.
    """

    def _roles(self) -> Roles:
        return Roles(self.comm.size, 0, self.comm.size)

    def _spread(self) -> TensorGroup:
        return TensorGroup()  # each rank sees all tables

    def _hold(self, flat: Array) -> Store:
        store = NodeCopy(self.comm, self.arena, flat)
        self.summation = store.reduction.summation
        store.algorithm, store.reason = "Hogwild", "one copy, without locks"
        return store

    def _ordered(self) -> Order | None:
        return None  # nobody knows it

    def _link(self) -> Exchange:
        return Unlocked(cast(NodeCopy, self.store).flat)

    def _count_updates(self, steps: int) -> None:
        self.updater.steps += steps
