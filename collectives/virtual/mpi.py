"""Communicators of a virtual cluster, in the place of ``mpi4py.MPI``'s.

Types, operations and constants are mpi4py's own.  The library's own collectives are few, as those
of a program go by the package's algorithms; their sums have the order of recursive doubling, as
small ones of Open MPI and MPICH do.  Every rank has a node to itself.
"""

import time
from collections.abc import Callable
from types import new_class
from typing import Any, cast

from collectives.virtual.communicator import Comm, Group
from collectives.virtual.rank import here
from collectives.virtual.requests import Handled, Prequest, ProbedMessage, VirtualRequest


def _delegated(name: str) -> Callable[..., Any]:
    """A collective that goes by the package's algorithms, as messages."""

    def method(self: "Intracomm", *given: Any, **named: Any) -> Any:
        from collectives.communicator import Communicator

        ours = self.handle.ours
        if self.rank not in ours:
            ours[self.rank] = Communicator(cast(Any, Intracomm(self)))
        return getattr(ours[self.rank], name)(*given, **named)

    method.__name__ = name
    return method


class Intracomm(Comm):
    """A communicator."""


for _name in (
    *("Reduce_scatter_block", "Reduce_scatter", "Allgather", "Allgatherv", "Alltoall", "Alltoallv"),
    *("Bcast", "Reduce", "Gather", "Gatherv", "Scatter", "Scatterv", "Scan", "Exscan"),
):
    for _method in (_name, f"I{_name.lower()}"):
        if _method not in vars(Comm):
            setattr(Intracomm, _method, _delegated(_method))


class Topocomm(Intracomm):
    """A communicator with a topology, of which a virtual cluster has none."""


#: Other classes of MPI's whose objects a virtual cluster has none of.
_ABSENT = {
    "Win": new_class("Win", (Handled,)),
    **{name: new_class(name, (Topocomm,)) for name in ("Cartcomm", "Graphcomm", "Distgraphcomm")},
}


class World(Intracomm):
    """All ranks of the cluster that this thread is of."""

    of: Any = Intracomm.of  # communicators that are made of it are plain
    handle = property(lambda self: here().cluster.world, lambda self, _: None)


class Alone(Intracomm):
    """The rank that this thread is."""

    of: Any = Intracomm.of
    handle = property(lambda self: here().alone, lambda self, _: None)


COMM_WORLD = World()
#: By the names of mpi4py, whose place they take.
NAMES = {
    **{kind.__name__: kind for kind in (Group, Comm, Intracomm, Topocomm, Prequest)},
    **{"Request": VirtualRequest, "Message": ProbedMessage, "REQUEST_NULL": VirtualRequest()},
    **{"COMM_NULL": Intracomm(), "COMM_WORLD": COMM_WORLD, "COMM_SELF": Alone()},
    **{"Wtime": lambda: time.perf_counter(), "Init": lambda: None, "Finalize": lambda: None},
    **{"get_vendor": lambda: ("virtual cluster", (1, 0, 0)), **_ABSENT},
}
