"""The sum of a bucket over nodes: dense inside of a node, by codes between one rank of each.

Memory of a node costs nothing to send, and a sum of k gradients loses less by a code than each of
them would (BytePS, Jiang et al. 2020).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives.codec import Residual
from collectives.coded import Part, Phased
from collectives.communicator import AnyPlan, Communicator
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.parallel.packing import Packed, ordered
from mpitrain.parallel.summation import Kept, Summand
from mpitrain.ranks.together import together


class Maker(Protocol):
    """Makes sums by codes and lists them: a :class:`~mpitrain.parallel.compressed.Compressed`."""

    exchanges: list[Any]
    scale: float

    @property
    def compression(self) -> Any: ...

    def exchange(self, summand: Summand, packed: Packed) -> Phased:
        """A sum by codes of each rank."""

    def residual(self, value: Array) -> Residual:
        """A memory of what codes leave out."""

    def forget(self, exchange: Any) -> None:
        """Takes a sum off the list."""


class NodeSum(Phased):
    """A reduction to the first rank of each node, a sum by codes over these, and a broadcast.

    On one node it is an all-reduce, and nothing is coded.  What codes leave out is kept by the
    first ranks.  What another rank has of it, after a resume on other nodes, it adds to its next
    gradients, so that nothing is lost.

    Cost, of s bytes on m nodes of k ranks: (k - 1) s up and down in each node, and the code's own
    on m ranks.

    Attributes:
        nodes: how many.
        is_finite: always, as other ranks see to it.
    """

    is_finite = True

    def __init__(self, summand: Summand, packed: Packed, made_by: Maker) -> None:
        """Bind it; collective.

        Args:
            summand: its whole sum goes to all ranks.
            packed: its elements that are coded.
            made_by: makes the sum between the nodes.

        Raises:
            ConfigError: on all ranks; MPI has no communicators left.
        """
        assert summand.counts is None, "the job was refused"
        comm, own, how = summand.comm, summand.own, made_by.compression
        self._summand, self._packed, self._made_by = summand, packed, made_by
        self._node = _made(comm, lambda: comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank))
        is_first = self._node.rank == 0
        self._alike = _made(comm, lambda: comm.Split(is_first, comm.rank))
        self.nodes: int = comm.allreduce(int(is_first))
        self.algorithm = f"{how.code} between {self.nodes} nodes"
        self.reason = f"{packed.share:.0%} of elements"
        self._up: AnyPlan | None = None
        self._down: AnyPlan | None = None
        if self.nodes == 1:
            self.algorithm, self.reason = "dense", "one node"
            self._up = ordered(self._node, own)
        elif self._node.size > 1:
            ends = (MPI.IN_PLACE, own) if is_first else (own, None)
            self._up = self._node.Reduce_init(*ends, algorithm="binomial_tree")
            self._down = self._node.Bcast_init(own, algorithm="binomial_tree")
        self._across = None
        self._left: Residual | None = None
        if is_first and self.nodes > 1:
            between = replace(summand, comm=self._alike, total=own)
            self._across = made_by.exchange(between, packed.of(between))
        else:
            if how.feedback:
                self._left = made_by.residual(np.zeros_like(packed.coded))
            made_by.exchanges.append(self)
        super().__init__(comm, [plan for plan in (self._up, self._down) if plan])

    def phases(self) -> Iterator[Part]:
        own = self._summand.own
        if self._left is not None and self._left.value.any():
            self._hand_over(self._left)
        if self._up:
            yield self._up
        if self._across:
            yield self._across
        if self._down:
            yield self._down
        if self._summand.total is not own:
            self._summand.total[...] = own

    def _hand_over(self, left: Residual) -> None:
        due = np.zeros_like(left.value)
        left.add_to(due)
        left.keep(due, due)
        due *= self._made_by.scale
        for run in self._packed.runs_of(slice(0, due.size), coded=True):
            part = due[run.at : run.at + run.stop - run.start]
            self._summand.own[run.start : run.stop] += part

    @property
    def encoded(self) -> int:
        """Bytes of this rank's gradients, which are not coded."""
        return self._summand.own.nbytes

    def commit(self) -> None:
        """The step counts."""
        if self._left:
            self._left.commit()

    def rollback(self) -> None:
        """The step is skipped."""
        if self._left:
            self._left.rollback()

    def kept(self) -> Iterator[Kept]:
        """What this rank is to hand over."""
        for name, values in self._left.arrays.items() if self._left else ():
            part = slice(0, values.size)
            yield from self._packed.kept(
                name, values, part, coded=True, is_per_replica=True, when_alone="owner"
            )

    def state(self) -> Mapping[str, Array]:
        """Nothing else."""
        return {}

    def Free(self) -> None:
        super().Free()
        if self._across:
            self._across.Free()
        else:
            self._made_by.forget(self)
        self._alike.Free()
        self._node.Free()


def _made(comm: Communicator, make: Callable[[], Communicator]) -> Communicator:
    """A communicator of its own for a bucket, as buckets are complete in any order."""

    def tried() -> Communicator:
        try:
            return make()
        except MPI.Exception as error:
            raise ConfigError(
                "compress.level: nodes takes two communicators for each bucket of gradients, and "
                "MPI has no more of them; raise parallel.bucket_bytes, or set level = 'ranks'"
            ) from error

    return together(comm, tried, ConfigError)
