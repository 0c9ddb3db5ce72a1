"""The call of torch's DistributedDataParallel, so that scripts change an import."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch.utils._pytree import tree_map_only

from collectives import Communicator
from mpitrain.adapters.torch.replica import DataParallel

#: Options of torch's that are about speed or memory, or what is done in any case.
_IN_ANY_CASE = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "init_sync")
_INSTEAD = {
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
        device_ids: Sequence[int | torch.device | str] | None = None,
        **options: Any,
    ) -> None:
        """Give all ranks rank 0's parameters and buffers, and bind the all-reduces; collective.

        Args:
            module: as :class:`DataParallel` takes it.
            comm: the replicas; ``MPI.COMM_WORLD`` when left out.
            bucket_cap_mb: least size of a bucket, in MiB; 25 when left out.
            device_ids: of the GPU on which the module lies, to which inputs are moved: one.
            options: ``broadcast_buffers``, ``algorithm`` and ``overlap`` as :class:`DataParallel`
                has them.  Of torch's, ``find_unused_parameters``, ``gradient_as_bucket_view``,
                ``static_graph`` and ``init_sync`` are taken and change nothing: unused parameters
                are always found, and all ranks always begin with rank 0's values.

        Raises:
            TypeError: another option.
            ValueError: ``device_ids`` names another device than the module's; or on all ranks, as
                :class:`DataParallel`.
        """
        device = _device(module, device_ids)
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
        self._device = device

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's outputs, of inputs that are moved to its GPU if ``device_ids`` names it."""
        if self._device is not None:
            to = partial(torch.Tensor.to, device=self._device)
            inputs, keywords = tree_map_only(torch.Tensor, to, (inputs, keywords))
        return super().forward(*inputs, **keywords)


def _device(
    module: torch.nn.Module, given: Sequence[int | torch.device | str] | None
) -> torch.device | None:
    """Where inputs go."""
    if not given:
        return None
    wanted = [torch.device("cuda", n) if isinstance(n, int) else torch.device(n) for n in given]
    found = {parameter.device for parameter in module.parameters()}
    if len(wanted) > 1 or found - set(wanted):
        raise ValueError(
            f"device_ids names {', '.join(map(str, wanted))}, and the module lies on "
            f"{', '.join(sorted(map(str, found)))}; a rank has one GPU: module.to(device), "
            "device_ids=[device]; on the CPU, leave it out"
        )
    return wanted[0]
