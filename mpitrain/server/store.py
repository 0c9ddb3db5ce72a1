"""Stores of workers and servers: all have all parameters, and a server updates its part."""

import numpy as np

from collectives import Communicator
from mpitrain.arrays import Array, Gradients
from mpitrain.group import share
from mpitrain.parallel.arena import DATA, Arena
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.parallel.store import Piece, Reduction, Store
from mpitrain.server.roles import Members, Roles


class Spread:
    """All parameters on every rank, flat, each server's part from that server.

    Cost of :meth:`meet`, of s bytes: a broadcast of s / servers from each server.
    """

    def __init__(self, comm: Communicator, roles: Roles, flat: Array) -> None:
        self.flat = flat
        self.parts = [share(flat.size, number, roles.servers) for number in range(roles.servers)]
        self._comm = comm
        self._roles = roles

    def meet(self) -> None:
        """Give all ranks the servers' parameters.  Collective."""
        for number, part in enumerate(self.parts):
            if part.start < part.stop:
                self._comm.Bcast(self.flat[part], self._roles.server(number), algorithm="native")


class WorkerStore(WholeGradients):
    """Pulled parameters of a worker, and its gradients, summed over its group."""

    def __init__(
        self, arena: Arena, spread: Spread, reduction: Reduction, members: Members
    ) -> None:
        """Bind the sums over the group; collective over it."""
        comm, self.members = reduction.groups[DATA], members
        super().__init__(arena, reduction, comm.empty(arena.size, spread.flat.dtype))
        self.spread = spread
        self.views = arena.views(spread.flat)
        self.bind_sums()

    def publish(self) -> None:
        self.spread.meet()


class ServerStore(Store):
    """The part that a server updates, and all parameters for tests."""

    def __init__(
        self, arena: Arena, spread: Spread, reduction: Reduction, members: Members
    ) -> None:
        """Hold the part of this server."""
        super().__init__(arena, reduction, reduction.bucket_bytes, spread.flat.itemsize)
        self.members = members
        self.spread = spread
        self.views = arena.views(spread.flat)
        part = spread.parts[members.number]
        own = spread.flat[part]
        self.pieces = [Piece(part.start, own, np.zeros_like(own), DATA)]

    def accumulate(self, layer: int, gradients: Gradients) -> None:
        """Do nothing: a server has no samples of its own."""

    def progress(self) -> None:
        """Do nothing: its messages are the workers'."""

    def wait(self) -> float:
        return 0.0

    def publish(self) -> None:
        self.spread.meet()
