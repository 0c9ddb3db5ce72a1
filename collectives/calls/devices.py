"""The GPUs of a communicator's ranks: their memory, how its messages go, and NCCL."""

import logging
from typing import TYPE_CHECKING

from mpi4py import MPI

from collectives import extras
from collectives.errors import CollectiveError
from collectives.execution.memory import HOST, Memory
from collectives.execution.transport import Transport

if TYPE_CHECKING:
    from collectives.calls.nccl import Nccl
    from collectives.calls.resources import Resources
    from collectives.execution.transport.cuda_memory import CudaMemory


log = logging.getLogger("collectives")


class Devices:
    """The GPUs of one communicator; each part is made at its first use, which is collective.

    Attributes:
        way: how messages of device memory go: ``"direct"``, ``"staged"``, or ``"auto"`` as long as
            nobody has asked.
    """

    def __init__(self, resources: "Resources") -> None:
        self._resources = resources
        self._settings = resources.settings
        self.way = resources.settings.device
        self._gpus: dict[int, CudaMemory] = {}
        self._transports: dict[int, Transport] = {}
        self._nccl: Nccl | None = None
        self._can_nccl: bool | None = None

    def memory(self, gpu: int | None) -> Memory:
        """The memory of the host, or of a GPU of this rank, with the stream of this communicator's
        plans."""
        if gpu is None:
            return HOST
        if gpu not in self._gpus:
            self._gpus[gpu] = extras.CudaMemory(gpu)
        return self._gpus[gpu]

    def transport_of(self, gpu: int | None) -> Transport:
        """The transport for memory there.  Collective at its first use for device memory."""
        if gpu is None:
            return self._resources.transport
        if gpu not in self._transports:
            transport: Transport = self._resources.transport
            if self.road(gpu) == "staged":
                transport = extras.StagedTransport(transport, self.memory(gpu))
            self._transports[gpu] = transport
        return self._transports[gpu]

    def road(self, gpu: int) -> str:
        """How messages of device memory go, ``"direct"`` or ``"staged"``.  Collective at its first
        use.

        Args:
            gpu: the GPU whose memory this rank sends.
        """
        # Checksums and times are the host's.
        if self._settings.needs_messages:
            return "staged"
        if self.way == "auto":
            self._resources.progress.drain()
            node = self._resources.comm.Split_type(MPI.COMM_TYPE_SHARED)
            # The first ranks of each node try, as loading CUDA takes seconds; all must be able to.
            gpus = node.gather(gpu)
            works, seen = extras.probe(*gpus[:2]) if gpus else (True, "")
            node.Free()
            self.way = "direct" if all(self._resources.comm.allgather(works)) else "staged"
            log.info("device memory is %s: %s", self.way, seen or "as a node's first ranks found")
        if self.way == "direct" and extras.CudaMemory(gpu).allocates_asynchronously:
            log.warning(
                "CuPy allocates by cudaMallocAsync, whose memory MPI libraries send by way of the "
                "host; use CuPy's own pool, or Communicator.empty"
            )
        return self.way

    @property
    def is_direct(self) -> bool:
        """Whether it is known that this MPI takes device memory; the same on all ranks."""
        return self.way == "direct" and not self._settings.needs_messages

    def nccl(self, gpu: int) -> "Nccl":
        """NCCL among these ranks.  Collective at its first use.

        Args:
            gpu: the GPU that this rank's arrays are on.

        Raises:
            CollectiveError: on all ranks, where one of them cannot.
        """
        if self._nccl is None:
            self._resources.progress.drain()
            self._nccl = extras.Nccl(self._resources.comm, gpu)
        return self._nccl

    def has_nccl(self, gpu: int) -> bool:
        """Whether NCCL can be had: the same on all ranks.  Collective at its first use."""
        if self._can_nccl is None:
            try:
                self.nccl(gpu)
                self._can_nccl = True
            except CollectiveError as error:
                log.info("no NCCL: %s", error)
                self._can_nccl = False
        return self._can_nccl

    def revoke(self) -> None:
        """Lets go of everything without asking the other ranks."""
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None
        self._transports.clear()

    def close(self) -> None:
        """Lets go of everything.  Collective."""
        if self._nccl is not None:
            self._gpus[self._nccl.gpu].settle()
            self._nccl.close()
            self._nccl = None
        self._transports.clear()
