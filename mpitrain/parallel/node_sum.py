"""The sum of a bucket over nodes: dense within a node, by codes between one rank of each.

Memory of a node costs nothing to send, and the sum of k gradients loses less by a code than each of
them would (BytePS, Jiang et al. 2020).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from collectives.codec import Residual
from collectives.coded import Part, Phased
from collectives.communicator import AnyPlan, Communicator
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.parallel.coded_sum import CodingRun
from mpitrain.parallel.packed_bucket import Packed, ordered
from mpitrain.parallel.summation import KeptElements, Summand
from mpitrain.ranks.together import together


class NodeSum(Phased):
    """A reduction to the first rank of each node, a sum by codes over these, and a broadcast.

    On one node it is an all-reduce, and nothing is coded.  First ranks keep the residuals of the
    codes.  A residual that another rank has after a resume on other nodes is added to its next
    gradients, so that nothing is lost.

    Cost, of s bytes on m nodes of k ranks: (k - 1) s up and down in each node, and the code's own
    on m ranks.

    Attributes:
        nodes: number of nodes.
        is_finite: always true: the sums of first ranks show it.
    """

    is_finite = True

    def __init__(self, summand: Summand, packed: Packed, run: CodingRun) -> None:
        """Bind the sum; collective.

        Args:
            summand: the gradients; all ranks get the whole sum.
            packed: the coded elements, and the rest.
            run: how gradients are coded.

        Raises:
            ConfigError: on all ranks; MPI has no communicators left.
        """
        assert summand.counts is None, "the job was refused"
        comm, own, how = summand.comm, summand.own, run.how
        self._summand, self._packed, self._coding = summand, packed, run
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
            self._across = run.coded(between, packed.of(between))
        else:
            if how.feedback:
                self._left = run.residual(np.zeros_like(packed.coded.array))
            run.sums.append(self)
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
        """Add a residual to the gradients."""
        due = np.zeros_like(left.value)
        left.add_to(due)
        left.keep(due, due)
        due *= self._coding.scale
        for run in self._packed.runs_of(slice(0, due.size), coded=True):
            part = due[run.at : run.at + run.stop - run.start]
            self._summand.own[run.start : run.stop] += part

    @property
    def encoded(self) -> int:
        """Bytes of this rank's gradients, which are not coded."""
        return self._summand.own.nbytes

    def commit(self) -> None:
        """End a step that counts."""
        if self._left:
            self._left.commit()

    def rollback(self) -> None:
        """End a step that is skipped."""
        if self._left:
            self._left.rollback()

    def kept(self) -> Iterator[KeptElements]:
        """The residual that this rank is to hand over."""
        for name, values in self._left.arrays.items() if self._left else ():
            part = slice(0, values.size)
            yield from self._packed.kept(
                name, values, part, coded=True, is_per_replica=True, when_alone="owner"
            )

    def state(self) -> Mapping[str, Array]:
        """Nothing else is kept."""
        return {}

    def Free(self) -> None:
        super().Free()
        if self._across:
            self._across.Free()
        else:
            self._coding.forget(self)
        self._alike.Free()
        self._node.Free()


def _made(comm: Communicator, make: Callable[[], Communicator]) -> Communicator:
    """A communicator for one bucket, because buckets are complete in any order."""

    def tried() -> Communicator:
        try:
            return make()
        except MPI.Exception as error:
            raise ConfigError(
                "compress.level: nodes takes two communicators for each bucket of gradients, and "
                "MPI has no more of them; raise parallel.bucket_bytes, or set level = 'ranks'"
            ) from error

    return together(comm, tried, ConfigError)
