"""The loop of a job."""

from collections.abc import Callable

from mpi4py import MPI

from mpitrain.config import Config
from mpitrain.device import Device
from mpitrain.federated import FederatedLoop
from mpitrain.pipeline.runtime import Span, no_span
from mpitrain.ranks.stop import StopFlag
from mpitrain.run import SynchronousLoop
from mpitrain.server import ServedLoop
from mpitrain.training.assemble import assemble, closed_if_refused
from mpitrain.training.asynchronous import AsynchronousLoop
from mpitrain.training.loop import Loop
from mpitrain.training.parts import NO_OBJECTS, Parts, UserObjects


def start(
    comm: MPI.Intracomm,
    config: Config,
    objects: UserObjects = NO_OBJECTS,
    *,
    span: Span = no_span,
    stop: StopFlag | None = None,
    before_step: Callable[[Parts], None] | None = None,
    device: Device | None = None,
) -> Loop:
    """Make the parts of a job and the loop that its tables ask for; collective.

    Arguments and errors are those of :func:`mpitrain.training.assemble.assemble`.
    """
    hooks = {"span": span, "stop": stop, "before_step": before_step, "device": device}
    if config.federated.clients:
        return FederatedLoop.start(comm, config, objects, **hooks)
    if config.server.ranks or config.server.hogwild:
        return ServedLoop.start(comm, config, objects, **hooks)
    parts = assemble(
        comm, config, objects, span=span, stop=stop, before_step=before_step, device=device
    )
    asynchronous = config.parallel.schedule == "asynchronous"
    with closed_if_refused(parts.comm, parts.opened):
        return AsynchronousLoop(parts) if asynchronous else SynchronousLoop(parts)
