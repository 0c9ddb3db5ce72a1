"""Parameters once per node: each rank of the node updates a shard of the one copy that all read.

The gradients of a node are reduced and scattered, and each rank sums its shard over the nodes.  The
update writes the shard into the copy, so no parameters are gathered within a node, and parameters
and optimiser state take the memory of one rank.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.group import share
from mpitrain.parallel.arena import Arena, Bucket, Tensor
from mpitrain.parallel.compressed_summation import CompressedSummation
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.parallel.store import Allocate, Piece, Reduction, overlaps
from mpitrain.parallel.summation import Sum, Summand

T = TypeVar("T")


class NodeShared(WholeGradients):
    """One copy of the parameters on each node, in a shared window of MPI.

    Cost a step, of s bytes on nodes of k ranks: reduce-scatter s in the node, all-reduce s/k across
    nodes, and a barrier.  Codes are used across nodes alone: within a node, nothing is sent.
    """

    def __init__(
        self, arena: Arena, initial: Array, reduction: Reduction, allocate: Allocate
    ) -> None:
        """Allocate and bind; collective.  ConfigError: nodes have different numbers of ranks."""
        across = reduction.summation
        if isinstance(across, CompressedSummation):
            reduction = replace(reduction, summation=across.dense)
        super().__init__(arena, reduction, allocate(arena.size, initial.dtype))
        self._shared = {
            group: _NodeCopy(comm, arena, group, initial)
            for group, comm in reduction.groups.items()
            if group in arena.groups
        }
        self.views = arena.by_layer(lambda t: self._shared[t.group].view(t.start, t.stop, t.shape))
        self._across: list[Sum] = []
        for bucket in self.buckets:
            part, copy = self.own(bucket), self._shared[bucket.group]
            parameters = copy.view(part.start, part.stop, (part.stop - part.start,))
            gradients = np.zeros_like(parameters)
            self.pieces.append(Piece(part.start, parameters, gradients, bucket.group))
            if copy.across.size > 1:
                cut = _cut(arena, self.pieces[-1])
                summand = Summand(bucket, copy.across, gradients, cut, gradients)
                self._across.append(across.bind(summand))
        self.bind_sums([piece.gradients for piece in self.pieces])
        if self._across:
            self.reason = f"{self.reason}; between nodes {self._across[-1].algorithm}"

    def comm(self, bucket: Bucket) -> Communicator:
        """The ranks of the node."""
        return self._shared[bucket.group].node

    def wait(self) -> float:
        seconds = super().wait()
        start = perf_counter()
        for across in self._across:
            across.Start()
            across.Wait()
        return seconds + perf_counter() - start

    def publish(self) -> float:
        start = perf_counter()
        for copy in self._shared.values():
            copy.settle()
        return perf_counter() - start

    def owned(self, piece: Piece) -> slice:
        # All nodes hold the same sums: each takes its share of the work.
        across = self._shared[piece.group].across
        return share(piece.parameters.size, across.rank, across.size)

    def close(self) -> None:
        super().close()
        while self._across:
            self._across.pop().Free()
        # Views of the window's memory end with the window.
        self.views, self.pieces = [], []
        while self._shared:
            self._shared.popitem()[1].close()


def _cut(arena: Arena, shard: Piece) -> dict[str, Array]:
    """A shard's part of each tensor by name: a vector for a vector, a column for other tensors."""
    found = {}
    for tensor, part in overlaps(arena.tensors, shard):
        own = shard.gradients[part]
        found[tensor.name] = own.reshape(-1, 1) if len(tensor.shape) > 1 else own
    return found


class _NodeCopy:
    """A group's parameters in a window of each node."""

    def __init__(self, comm: Communicator, arena: Arena, group: str, initial: Array) -> None:
        tensors: list[Tensor] = [tensor for tensor in arena.tensors if tensor.group == group]
        self.start, stop = tensors[0].start, tensors[-1].stop
        self.node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self.across = comm.Split(self.node.rank, comm.rank)
        sizes = comm.allgather(self.node.size)
        if len(set(sizes)) > 1:
            self.across.Free()
            self.node.Free()
            raise ConfigError(
                f"parallel.node_shared needs as many ranks on every node, not {sorted(set(sizes))}"
            )
        self.window = NodeWindow(self.node, initial[self.start : stop])
        self.settle()

    def view(self, start: int, stop: int, shape: tuple[int, ...]) -> Array:
        return self.window.flat[start - self.start : stop - self.start].reshape(shape)

    def settle(self) -> None:
        self.window.settle(self.node.Barrier)

    def close(self) -> None:
        self.window.close()
        self.across.Free()
        self.node.Free()


class NodeWindow:
    """An array once a node, in a window of MPI that the ranks of the node share.

    Attributes:
        flat: the array, of shape (elements,), which other ranks change.
    """

    def __init__(self, node: MPI.Intracomm, initial: Array) -> None:
        """Allocate the window, with rank 0's ``initial``; collective; :meth:`settle` follows."""
        nbytes = initial.nbytes if node.rank == 0 else 0
        self._window = MPI.Win.Allocate_shared(nbytes, initial.itemsize, comm=node)
        memory: Any = self._window.Shared_query(0)[0]
        bytes_: Array = np.frombuffer(memory, np.uint8)
        self.flat: Array = bytes_[: initial.nbytes].view(initial.dtype)
        self._window.Lock_all()
        if node.rank == 0:
            self.flat[...] = initial

    def settle(self, meet: Callable[[], T]) -> T:
        """Make stores visible to all ranks of the node, around their collective call ``meet``."""
        self._window.Sync()
        found = meet()
        self._window.Sync()
        return found

    def close(self) -> None:
        """Free the memory, of which no views may be left; collective."""
        self.flat = np.empty(0)
        self._window.Unlock_all()
        self._window.Free()
