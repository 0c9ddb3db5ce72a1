"""Communicators of a virtual cluster, in the place of ``mpi4py.MPI``'s.

Types, operations and constants are mpi4py's own.  The library's own collectives are few, as those
of a program go by the package's algorithms; their sums have the order of recursive doubling, as
small ones of Open MPI and MPICH do.  Every rank has a node to itself.
"""

import time
from collections.abc import Callable
from types import new_class
from typing import Any, cast

from mpi4py import MPI as library

from collectives.virtual import requests, topologies
from collectives.virtual.communicator import Comm, Group, Intracomm
from collectives.virtual.rank import here
from collectives.virtual.requests import Begun, Handled, Prequest, ProbedMessage, VirtualRequest


def _ours(comm: Intracomm) -> Any:
    """Our communicator for these ranks, with all that its first call would meet for: MPI's
    nonblocking calls wait for nobody."""
    from collectives.calls.tables import load
    from collectives.communicator import Communicator

    context = comm.handle
    if comm.rank not in context.ours:
        made = context.ours[comm.rank] = Communicator(cast(Any, Intracomm(comm)))
        found = made._engine.resources
        found._ranks_per_node, found._table = 1, load(found.settings.tuning)
        found._transport = found.settings.transport(cast(Any, Intracomm.of(context.apart("ours"))))
    return context.ours[comm.rank]


def _delegated(name: str) -> Callable[..., Any]:
    """A collective that goes by the package's algorithms, as messages."""

    def method(self: Intracomm, *given: Any, **named: Any) -> Any:
        found = getattr(_ours(self), name)(*given, **named)
        if name.endswith("_init"):
            return Prequest.of(lambda: found.Start() or Begun(found))
        return None if found is None else VirtualRequest.of(Begun(found))

    method.__name__ = name
    return method


for _name in (
    *("Reduce_scatter_block", "Reduce_scatter", "Allgather", "Allgatherv", "Alltoall", "Alltoallv"),
    *("Bcast", "Reduce", "Gather", "Gatherv", "Scatter", "Scatterv", "Scan", "Exscan"),
    *("Allreduce", "Barrier"),
):
    for _method in (_name, f"I{_name.lower()}", f"{_name}_init"):
        if _method not in vars(Comm):
            setattr(Intracomm, _method, _delegated(_method))
for _name, _found in vars(topologies).items():
    if _name.startswith("create_"):
        setattr(Intracomm, _name.capitalize(), _found)

#: Classes of MPI's whose objects a virtual cluster has none of.
_ABSENT: dict[str, Any] = {
    one: new_class(one, (Handled,)) for one in ("Win", "File", "Intercomm", "Session", "Grequest")
}
for _name in _ABSENT:
    _ABSENT[_name].theirs = getattr(library, _name)
setattr(Comm, "Get_parent", staticmethod(_ABSENT["Intercomm"]))  # noqa: B010


class Constant(Intracomm):
    """A communicator that nobody frees."""

    of: Any = Intracomm.of  # communicators that are made of it are plain

    def free(self) -> None:
        pass


class World(Constant):
    """All ranks of the cluster that this thread is of."""

    held = property(lambda self: here().cluster.world, lambda self, _: None)


class Alone(Constant):
    """The rank that this thread is."""

    held = property(lambda self: here().alone, lambda self, _: None)


COMM_WORLD = World()
#: By the names of mpi4py, whose place they take.
NAMES = {
    **{kind.__name__: kind for kind in (Group, Comm, Prequest)},
    **{name: kind for name, kind in vars(topologies).items() if name.endswith("comm")},
    **{"Request": VirtualRequest, "Message": ProbedMessage, "REQUEST_NULL": VirtualRequest()},
    **{"COMM_NULL": Intracomm(), "COMM_WORLD": COMM_WORLD, "COMM_SELF": Alone()},
    **{"Wtime": lambda: time.perf_counter(), "Init": lambda: None, "Finalize": lambda: None},
    **{"get_vendor": lambda: ("virtual cluster", (1, 0, 0)), **_ABSENT},
    **{"MESSAGE_NULL": ProbedMessage(), "GROUP_NULL": Group(), "GROUP_EMPTY": Group.of(())},
    **{name: requests.lacks("MPI", name) for name in ("_addressof", "_handleof", "_sizeof")},
    **{"Attach_buffer": lambda buf: None, "Detach_buffer": lambda: None},
    "Init_thread": lambda required=0: library.Query_thread(),
    "Get_processor_name": lambda: f"virtual{here().number}",
}
