"""The call of torch's DistributedDataParallel, so that scripts change an import."""

from typing import Any

import torch
from mpi4py import MPI

from collectives import Communicator
from mpitrain.adapters.torch.replica import DataParallel

#: Options of torch's that are about speed or memory, or what is done in any case.
_IN_ANY_CASE = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "init_sync")
_INSTEAD = {
    "device_ids": "parameters stay on the CPU: leave it out",
    "process_group": "comm= takes an MPI communicator, as comm.Split gives it",
    "mixed_precision": "use torch.autocast around the forward pass",
}


class DistributedDataParallel(DataParallel):
    """:class:`DataParallel` with the module first, and all ranks by default.

    net = DistributedDataParallel(module)  # started by mpirun; no init_process_group
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        comm: MPI.Intracomm | None = None,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        """Give all ranks rank 0's parameters and buffers, and bind the all-reduces; collective.

        Args:
            module: on the CPU.
            comm: the replicas; ``MPI.COMM_WORLD`` when left out.
            bucket_cap_mb: least size of a bucket, in MiB; 25 when left out.
            options: ``broadcast_buffers``, ``algorithm`` and ``overlap`` as :class:`DataParallel`
                has them.  Of torch's, ``find_unused_parameters``, ``gradient_as_bucket_view``,
                ``static_graph`` and ``init_sync`` are taken and change nothing: unused parameters
                are always found, and all ranks always begin with rank 0's values.

        Raises:
            TypeError: another option.
            ValueError: on all ranks, as :class:`DataParallel`.
        """
        given = {name: value for name, value in options.items() if name not in _IN_ANY_CASE}
        for name, value in list(given.items()):
            if name in ("algorithm", "overlap", "broadcast_buffers"):
                continue
            if value is not None:
                why = _INSTEAD.get(name, "see DataParallel for those that there are")
                raise TypeError(f"DistributedDataParallel has no option {name}; {why}")
            del given[name]
        if bucket_cap_mb is not None:
            given["bucket_bytes"] = int(bucket_cap_mb * 2**20)
        whole = comm if isinstance(comm, Communicator) else Communicator(comm or MPI.COMM_WORLD)
        super().__init__(whole, module, **given)
