"""Choice of the loop that trains a job."""

from typing import Unpack

from mpi4py import MPI

from mpitrain.auto_stages import auto_stages
from mpitrain.config import Config
from mpitrain.federated import FEDERATED, FederatedLoop
from mpitrain.memory import keep_freed
from mpitrain.run import SynchronousLoop
from mpitrain.server import ServedLoop, ServerPlacing
from mpitrain.training.assemble import Hooks, assemble, closed_if_refused
from mpitrain.training.asynchronous import AsynchronousLoop
from mpitrain.training.loop import Loop
from mpitrain.training.parts import NO_OBJECTS, UserObjects
from mpitrain.training.variant import USUAL


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
    config = auto_stages(comm, config, go_on=go_on)
    placing, variant = ServerPlacing(), USUAL
    is_served = config.server.ranks or config.server.hogwild
    if config.federated.clients:
        variant = FEDERATED
    elif is_served:
        variant = placing.variant(config)
    parts = assemble(comm, config, objects, variant=variant, **hooks)
    with closed_if_refused(parts.comm, parts.opened):
        if config.federated.clients:
            return FederatedLoop(parts)
        if is_served:
            return ServedLoop(parts, placing.members)
        if config.parallel.schedule == "asynchronous":
            return AsynchronousLoop(parts)
        return SynchronousLoop(parts)
