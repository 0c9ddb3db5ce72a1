"""Choice of the loop that trains a job."""

from collections.abc import Callable
from typing import Unpack

from mpi4py import MPI

from mpitrain import extras
from mpitrain.config import Config
from mpitrain.memory import keep_freed
from mpitrain.run import SynchronousLoop
from mpitrain.training.assemble import Hooks, assemble, closed_if_refused
from mpitrain.training.loop import Loop
from mpitrain.training.parts import NO_OBJECTS, Parts, UserObjects
from mpitrain.training.variant import USUAL, Variant


def kind(config: Config) -> tuple[Variant, Callable[[Parts], Loop]]:
    """How a kind of job makes its parts, and its loop."""
    if config.federated.clients:
        return extras.kind_of_clients(config)
    if config.server.ranks or config.server.hogwild:
        return extras.kind_of_servers(config)
    is_stale = config.parallel.schedule == "asynchronous"
    return USUAL, extras.AsynchronousLoop if is_stale else SynchronousLoop


def start(
    comm: MPI.Intracomm,
    config: Config,
    objects: UserObjects = NO_OBJECTS,
    *,
    go_on: bool = False,
    **hooks: Unpack[Hooks],
) -> Loop:
    """Make the parts of a job and the loop that its tables ask for; collective.

    Arguments and errors are those of :func:`mpitrain.training.assemble.assemble`; with ``go_on``, a
    job that leaves its stages to the partitioner has those of the newest checkpoint.
    """
    keep_freed()
    if config.parallel.partition == "auto":
        config = extras.auto_stages(comm, config, go_on=go_on)
    variant, loop = kind(config)
    parts = assemble(comm, config, objects, variant=variant, **hooks)
    with closed_if_refused(parts.comm, parts.opened):
        return loop(parts)
