"""Makes the backend known to torch, which calls this through the package's entry points.

Nothing here starts MPI: that happens when a program makes its first group.
"""

import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from collectives.torch import NAME

#: Environment variable by which "mpi" is ours in programs that start Python themselves.
VARIABLE = "COLLECTIVES_TORCH"
#: Oldest version of torch that was tried.
OLDEST = (2, 9)


def autoload() -> None:
    """Registers the backend; ``import torch`` calls this at its end.

    With ``COLLECTIVES_TORCH=mpi`` in the environment, :func:`take_over` as well.  An error becomes
    a warning, as it would keep every program from importing torch.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    try:
        register()
        if os.environ.get(VARIABLE) == "mpi":
            take_over()
    except Exception as error:
        warnings.warn(f"torch does not get the backend {NAME!r}: {error!r}", stacklevel=2)


def version() -> tuple[int, ...]:
    """Major and minor version of torch."""
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def register() -> None:
    """Registers the backend and the scheme ``mpi://`` of rendezvous, once.

    Raises:
        RuntimeError: torch is older than all that were tried.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

    from collectives.torch.devices import device_types

    if version() < OLDEST:
        raise RuntimeError(
            "groups over MPI need torch {}.{}, and this one is {}.{}; pip install -U torch brings "
            "a newer one".format(*OLDEST, *version())
        )
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=device_types())
    if "mpi" not in _rendezvous_handlers:
        register_rendezvous_handler("mpi", _rendezvous)


def take_over() -> list[str]:
    """Lets programs that name "mpi", or nothing, run on this backend.

    Returns:
        Sentences that say what was changed in torch.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d
    from torch.distributed.rendezvous import _rendezvous_handlers

    from collectives.torch.devices import device_types

    register()
    c10d: Any = torch.distributed.distributed_c10d
    dist.Backend.register_backend("mpi", _create, extended_api=True, devices=device_types())
    c10d._MPI_AVAILABLE = True
    if not hasattr(c10d, "_create_mpi_process_group"):  # torch up to 2.13
        c10d.ProcessGroupMPI = SimpleNamespace(create=_old_mpi)
    c10d.Store = _store  # torch calls it for groups "mpi" alone
    dist.Backend.default_device_backend_map["cpu"] = NAME
    environment = _rendezvous_handlers["env"]

    def by_environment(url: str, **named: Any) -> Iterator[Any]:
        is_given = {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)
        yield from (environment if is_given else _rendezvous)(url, **named)

    _rendezvous_handlers["env"] = by_environment
    make = c10d._new_group_with_tag

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **named: Any
    ) -> Any:
        # torch tells a group "mpi" its ranks alone, and lets no members make it by themselves.
        needs_more = timeout or any(args) or named.get("use_local_synchronization")
        if needs_more and (backend or dist.get_backend()).lower() == "mpi":
            backend = NAME
        return make(ranks, timeout, backend, *args, **named)

    c10d._new_group_with_tag = new_group
    changes = [
        'The backend "mpi" is this one, and torch.distributed.is_mpi_available() is true.',
        f'A group "mpi" with more than ranks, as use_local_synchronization, is of "{NAME}".',
        f'Groups of CPU tensors that name no backend are of "{NAME}".',
        "env:// without MASTER_ADDR and MASTER_PORT asks MPI for ranks, as mpi:// does.",
        "FSDP2 takes its buffers from its group, in memory that the ranks of a node share.",
    ]
    if os.environ.pop("TORCH_DISTRIBUTED_USE_TORCHCOMMS", None):
        changes.append("TORCH_DISTRIBUTED_USE_TORCHCOMMS is unset, as it overrides every backend.")
    return changes


def _create(options: Any, given: Any = None) -> Any:
    from collectives.torch.backend import create

    return create(options, given)


def _rendezvous(url: str, **named: Any) -> Iterator[Any]:
    from collectives.torch.rendezvous import rendezvous

    return rendezvous(url, **named)


def _store() -> Any:
    """The store of a group "mpi", in the place of torch's, which does nothing.

    Gloo's groups beside it need one, as torch's checkpoints make them.
    """
    return next(_rendezvous("mpi://"))[0]


def _old_mpi(ranks: list[int]) -> Any:
    """A group "mpi" of torch up to 2.13."""
    from torch.distributed import distributed_c10d as c10d

    from collectives.torch.backend import create_group

    return create_group(ranks, c10d.default_pg_timeout, None)
