"""Choice of the loop that trains a job."""

from typing import Unpack

from mpi4py import MPI

from mpitrain import extras
from mpitrain.config import Config
from mpitrain.memory import keep_freed
from mpitrain.training.assemble import Hooks, assemble, closed_if_refused
from mpitrain.training.loop import Loop
from mpitrain.training.parts import NO_OBJECTS, Parts, UserObjects
from mpitrain.training.step import SynchronousLoop


def loop_of(parts: Parts) -> Loop:
    """The loop that the tables of a job ask for; collective."""
    config = parts.config
    if config.federated.clients:
        return extras.FederatedLoop(parts)
    if config.server.ranks or config.server.hogwild:
        return extras.ServedLoop(parts)
    if config.sync.drifts:
        return extras.DriftingLoop(parts)
    if config.parallel.schedule == "asynchronous":
        return extras.AsynchronousLoop(parts)
    return SynchronousLoop(parts)


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
    parts = assemble(comm, config, objects, **hooks)
    with closed_if_refused(parts.comm, parts.opened):
        return loop_of(parts)
