"""Makes the backend known to torch, which calls this through the package's entry points.

Nothing here starts MPI: that happens when a program makes its first group.
"""

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

from collectives.torch import NAME

#: Environment variable by which "mpi" is ours in programs that start Python themselves.
VARIABLE = "COLLECTIVES_TORCH"
#: Oldest version of torch that was tried.
OLDEST = (2, 9)


def autoload() -> None:
    """Registers the backend; ``import torch`` calls this at its end.

    With ``COLLECTIVES_TORCH=mpi`` in the environment, :func:`take_over` as well; further names, as
    in ``mpi,gloo``, are replaced.  An error becomes a warning, as it would keep every program from
    importing torch.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    try:
        register()
        names = os.environ.get(VARIABLE, "").split(",")
        if "mpi" in names:
            take_over(tuple(names))
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
    from torch.distributed import register_rendezvous_handler

    from collectives.torch.devices import device_types

    if version() < OLDEST:
        raise RuntimeError(
            "groups over MPI need torch {}.{}, and this one is {}.{}; pip install -U torch brings "
            "a newer one".format(*OLDEST, *version())
        )
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=device_types())
        register_rendezvous_handler("mpi", _rendezvous)
        end_in_one_order()
        if version() < (2, 14):
            serve_monitored_barrier()


@functools.cache
def take_over(replaced: tuple[str, ...] = ()) -> list[str]:
    """Lets programs that name "mpi", or nothing, run on this backend.

    torch treats the group whose name is ``Backend.MPI`` apart: it has no store, no options, no time
    limit and MPI's numbers alone.  So that name becomes one that no program gives, and "mpi" is a
    backend as any other.  Programs still read "mpi" in ``torch.distributed.Backend.MPI``.

    Args:
        replaced: names of other backends for which programs get "mpi".

    Returns:
        Sentences that say what was changed in torch.

    Raises:
        ValueError: torch knows no backend by such a name.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import _rendezvous_handlers

    from collectives.torch.devices import device_types

    register()
    kind: Any = c10d.Backend
    public: Any = import_module("torch.distributed")
    if unknown := set(replaced) - set(kind.backend_list):
        known = ", ".join(sorted({*kind.backend_list} - {kind.UNDEFINED}))
        raise ValueError(f"torch knows no backend {', '.join(sorted(unknown))} but {known}")
    kind.register_backend("mpi", _create, extended_api=True, devices=device_types())
    kind.default_device_backend_map["cpu"], theirs, kind.MPI = NAME, kind.__new__, "no backend"
    names = re.compile(rf"(?<![^:])({'|'.join(('mpi', *replaced))})(?![^,])", re.IGNORECASE)
    kind.__new__ = lambda cls, name: (
        found if (found := names.sub("mpi", name)) == "mpi" else theirs(cls, found)
    )
    public.Backend = type("Backend", (kind,), {"MPI": "mpi"})
    public.is_mpi_available = c10d.is_mpi_available = lambda: True
    environment = _rendezvous_handlers["env"]

    def by_environment(url: str, **named: Any) -> Iterator[Any]:
        is_given = {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ) and all(
            name in os.environ or f"{name.lower()}=" in url for name in ("RANK", "WORLD_SIZE")
        )
        yield from (environment if is_given else _rendezvous)(url, **named)

    _rendezvous_handlers["env"] = by_environment
    changes = [
        *(f'The backend "{name}" is "mpi".' for name in replaced if name != "mpi"),
        'The backend "mpi" is this one, and torch.distributed.is_mpi_available() is true.',
        f'Groups of CPU tensors that name no backend are of "{NAME}".',
        "env:// without MASTER_ADDR, MASTER_PORT or ranks asks MPI for ranks, as mpi:// does.",
        "FSDP2 takes its buffers from its group, in memory that the ranks of a node share.",
    ]
    if os.environ.pop("TORCH_DISTRIBUTED_USE_TORCHCOMMS", None):
        changes.append("TORCH_DISTRIBUTED_USE_TORCHCOMMS is unset, as it overrides every backend.")
    return changes


def tell_of_others(command: Callable[[str], str]) -> None:
    """Lets rank 0 say once by which ``command`` Gloo is replaced, and an error of NCCL's say it."""
    c10d: Any = import_module("torch.distributed.distributed_c10d")

    @functools.cache
    def tell() -> None:
        text = 'the script names the backend "gloo", which is not over MPI; to replace it'
        print(f"{text}: {command('gloo')}", file=sys.stderr, flush=True)

    def made(make: Any, *given: Any, **named: Any) -> Any:
        try:
            group, nobody = make(*given, **named), c10d.GroupMember.NON_GROUP_MEMBER
        except Exception as error:
            if "NCCL" in str(error):
                error.add_note(f'to replace the backend "nccl": {command("nccl")}')
            raise
        is_told = os.environ["RANK"] == "0" and group != nobody
        if is_told and "gloo" in c10d.get_backend_config(group):
            tell()
        return group

    for name in ("init_process_group", "new_group"):
        theirs = getattr(c10d, name)
        for owner in (c10d, c10d.torch.distributed):
            setattr(owner, name, functools.wraps(theirs)(functools.partial(made, theirs)))


def end_in_one_order() -> None:
    """Lets ranks end all groups in one order, the newest first.

    torch goes by their names, which ranks may not share where they make groups alone.
    """
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    theirs = c10d.destroy_process_group

    @functools.wraps(theirs)
    def destroy_process_group(group: Any = None) -> None:
        if group in (None, c10d.GroupMember.WORLD) and "collectives.torch.backend" in sys.modules:
            from collectives.torch.backend import backend_of

            for own in filter(None, map(backend_of, reversed([*c10d._world.pg_map]))):
                own.shutdown()
        theirs(group)

    c10d.torch.distributed.destroy_process_group = destroy_process_group
    c10d.destroy_process_group = destroy_process_group


def serve_monitored_barrier() -> None:
    """Lets ``torch.distributed.monitored_barrier`` take our groups, as from torch 2.14 on."""
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    theirs = c10d.monitored_barrier

    @functools.wraps(theirs)
    def monitored_barrier(group: Any = None, timeout: Any = None, *given: Any, **named: Any) -> Any:
        group = group or c10d.group.WORLD
        if getattr(group, "name", str)() != NAME:
            return theirs(group, timeout, *given, **named)
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        return group.monitored_barrier(limit, *given, **named)

    c10d.torch.distributed.monitored_barrier = c10d.monitored_barrier = monitored_barrier


def _create(options: Any, given: Any = None) -> Any:
    from collectives.torch.backend import create

    return create(options, given)


def _rendezvous(url: str, **named: Any) -> Iterator[Any]:
    from collectives.torch.rendezvous import rendezvous

    return rendezvous(url, **named)
