"""What a communicator's collectives use: its duplicate, the node's memory, the table, the GPU."""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt
from mpi4py import MPI

from collectives.cuda_probe import probe
from collectives.errors import CollectiveError, InvalidBuffer
from collectives.memory import HOST, CudaMemory, Memory
from collectives.transport.device import DirectTransport, StagedTransport
from collectives.transport.mpi import MPITransport
from collectives.transport.shared_memory import NodeMemory
from collectives.tuner import Table, load

log = logging.getLogger("collectives")


class Resources:
    """Made when they are first needed, which is collective for each of them.

    Attributes:
        node: memory that all ranks can address, once some was asked for and can be had.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        tuning: str | Path | None,
        device: str,
        transport: type[MPITransport],
    ) -> None:
        self.comm = MPI.Intracomm(comm)
        self.tuning = tuning
        self.device = device
        self.kind = transport
        self.node: NodeMemory | None = None
        self._transport: MPITransport | None = None
        self._unshared: set[str] = set()

    @property
    def transport(self) -> MPITransport:
        """Messages on a duplicate of the communicator, where they cannot meet the caller's."""
        if self._transport is None:
            self._transport = self.kind(self.comm.Dup())
        return self._transport

    @property
    def channel(self) -> MPI.Intracomm:
        """The duplicate."""
        return self.transport.channel

    @cached_property
    def ranks_per_node(self) -> int:
        """On the fullest node."""
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        most = self.comm.allreduce(node.size, MPI.MAX)
        node.Free()
        return most

    @cached_property
    def table(self) -> Table:
        """The tuning table, as rank 0 finds it."""
        told: Table | CollectiveError | None = None
        if self.comm.rank == 0:
            try:
                told = load(self.tuning)
            except CollectiveError as error:
                told = error
        told = self.comm.bcast(told)
        if not isinstance(told, Table):
            raise told or CollectiveError("rank 0 has no tuning table")
        return told

    @cached_property
    def device_transport(self) -> DirectTransport | StagedTransport:
        """For device memory, as ``device`` says."""
        # Checksums are computed by the host.
        how = "staged" if self.kind.sealed else self.device
        if how == "auto":
            # One rank of each node tries, as loading CUDA takes seconds; all must be able to.
            node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
            works, seen = probe() if node.rank == 0 else (True, "")
            node.Free()
            how = "direct" if self.comm.allreduce(works, MPI.LAND) else "staged"
            log.info("device memory is %s: %s", how, seen or "as the node's first rank found")
        memory = CudaMemory()
        if how == "direct":
            return DirectTransport(self.transport, memory)
        return StagedTransport(self.transport, memory)

    def empty(self, shape: Any, dtype: npt.DTypeLike, memory: str) -> npt.NDArray[Any]:
        """Zeros in the node's memory, or in ordinary memory where that cannot be.

        Args:
            memory: ``"numpy"`` or ``"cupy"``.
        """
        kind: Memory = CudaMemory() if memory == "cupy" else HOST
        alone = self.ranks_per_node < self.comm.size or self.kind.sealed
        if not alone and memory not in self._unshared:
            try:
                if self.node is None:
                    self.node = NodeMemory(self.channel)
                return self.node.empty(shape, dtype, kind)
            except InvalidBuffer as error:  # on all ranks
                log.warning("ordinary memory instead of shared: %s", error)
                self._unshared.add(memory)
        return kind.zeros(shape, dtype)

    def revoke(self) -> None:
        """Ends all waits in the duplicate, and lets go of it."""
        self.node = None
        if self._transport is not None:
            self._transport.channel.Revoke()
            self._transport = None

    def close(self) -> None:
        """Releases the duplicate; arrays in the node's memory stay.  Collective."""
        if self.node is not None:
            self.node.close()
            self.node = None
        if self._transport is not None:
            self._transport.channel.Free()
            self._transport = None
