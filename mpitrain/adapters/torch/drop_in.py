"""The interface of torch's DistributedDataParallel, so that scripts only change an import."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from numbers import Real
from typing import Any

import torch
from mpi4py import MPI
from torch.utils._pytree import tree_map_only

from collectives import Communicator
from mpitrain.adapters.torch.replica import DataParallel
from mpitrain.ranks.together import together

#: Options of torch's without effect here: they ask for speed or memory, or for usual behaviour.
_WITHOUT_EFFECT = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "init_sync")
#: Defaults of other options of torch's, which are accepted with this value or None alone.
_DEFAULTS = {"dim": 0, "check_reduction": False, "skip_all_reduce_unused_params": False}
_INSTEAD = {
    "dim": "samples lie along axis 0",
    "process_group": "comm= takes an MPI communicator, as comm.Split gives it",
    "mixed_precision": "use torch.autocast around the forward pass",
}
_Named = int | torch.device | str


class DistributedDataParallel(DataParallel):
    """:class:`DataParallel` with the module first, and all ranks by default.

    net = DistributedDataParallel(module)  # started by mpirun; no init_process_group
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[_Named] | None = None,
        output_device: _Named | None = None,
        dim: int = 0,
        *,
        comm: MPI.Intracomm | None = None,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        """Give all ranks rank 0's parameters and buffers, and bind the all-reduces; collective.

        Args:
            module: a module, as for :class:`DataParallel`.
            device_ids: the one GPU on which the module lies; inputs are moved there.
            output_device: the device on which the module lies, or None: outputs stay there.
            dim: 0, the axis of the samples.
            comm: the replicas; ``MPI.COMM_WORLD`` when left out.
            bucket_cap_mb: least size of a bucket, in MiB, above 0; 25 when left out.
            options: ``broadcast_buffers``, ``algorithm`` and ``overlap`` as for
                :class:`DataParallel`.  torch's ``find_unused_parameters``,
                ``gradient_as_bucket_view``, ``static_graph`` and ``init_sync`` are accepted and
                have no effect: unused parameters are always found, and all ranks always begin with
                rank 0's values.  Its other options are accepted with torch's defaults.

        Raises:
            LaunchError: a launcher, as torchrun, has started more processes than MPI sees.
            TypeError: on all ranks: another option, or another value of one of torch's.
            ValueError: on all ranks: ``device_ids`` or ``output_device`` name another device than
                the module's, ``bucket_cap_mb`` is no finite number above 0, or an error of
                :class:`DataParallel`.
        """

        def read() -> tuple[torch.device | None, dict[str, Any]]:
            found = _device("device_ids", module, device_ids)
            _device("output_device", module, None if output_device is None else [output_device])
            return found, _options({"dim": dim, **options}) | _bucket_bytes(bucket_cap_mb)

        device, given = together(comm or MPI.COMM_WORLD, read, TypeError, ValueError, RuntimeError)
        whole = comm if isinstance(comm, Communicator) else Communicator(comm or MPI.COMM_WORLD)
        super().__init__(whole, module, **given)
        self._device = device

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's outputs; inputs are moved to its GPU if ``device_ids`` names it."""
        if self._device is not None:
            to = partial(torch.Tensor.to, device=self._device)
            inputs, keywords = tree_map_only(torch.Tensor, to, (inputs, keywords))
        return super().forward(*inputs, **keywords)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for :class:`DataParallel`."""
    given = {}
    for name, value in options.items():
        if name in ("algorithm", "overlap", "broadcast_buffers"):
            given[name] = value
        elif name not in _WITHOUT_EFFECT and value not in (None, _DEFAULTS.get(name)):
            why = _INSTEAD.get(name, "see DataParallel for those that there are")
            value = f" = {value!r}" if name in _DEFAULTS else ""
            raise TypeError(f"DistributedDataParallel has no option {name}{value}; {why}")
    return given


def _bucket_bytes(mebibytes: Any) -> dict[str, int]:
    if mebibytes is None:
        return {}
    if not isinstance(mebibytes, Real) or not isfinite(mebibytes) or mebibytes <= 0:
        raise ValueError(
            f"bucket_cap_mb = {mebibytes!r}: the least size of a bucket in MiB is a finite number "
            "above 0; leave it out for 25"
        )
    return {"bucket_bytes": max(1, int(float(mebibytes) * 2**20))}


def _device(
    what: str, module: torch.nn.Module, given: Sequence[_Named] | None
) -> torch.device | None:
    """The device that is given for inputs or outputs, if it is the module's."""
    if not given:
        return None
    wanted = [torch.device("cuda", n) if isinstance(n, int) else torch.device(n) for n in given]
    found = {parameter.device for parameter in module.parameters()}
    if len(wanted) > 1 or found - set(wanted):
        raise ValueError(
            f"{what} names {', '.join(map(str, wanted))}, and the module lies on "
            f"{', '.join(sorted(map(str, found)))}; a rank has one GPU: module.to(device), "
            "device_ids=[device]; on the CPU, leave it out"
        )
    return wanted[0]
