"""The methods for Python objects, and ``Alltoallw``: mpi4py's own."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from mpi4py import MPI

from collectives.calls.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")


def after_plans(
    method: Callable[Concatenate[Any, P], R],
    what: str = "",
    by_all: bool = True,
    end: Callable[[Any, R], R] = lambda _, found: found,
) -> Callable[Concatenate[Any, P], R]:
    """mpi4py's method, once the plans of this communicator that are under way have ended.

    Args:
        what: the method in the words of the watchdog; by default its name.
        by_all: whether all ranks call it, so that the plans under way can be ended first.
        end: from the communicator and what the method returns to the result.
    """
    what = what or method.__name__.lower()

    @wraps(method)
    def called(self: Any, *given: P.args, **named: P.kwargs) -> R:
        engine = self._engine
        with engine.after_plans(what) if by_all else engine.waiting(what, by_all=False):
            return end(self, method(self, *given, **named))

    return called


class Objects:
    """mpi4py's methods, which the watchdog sees.

    They move no plan along: those of this communicator are ended first, as all ranks have started
    them.
    """

    _engine: Engine

    allgather = after_plans(MPI.Intracomm.allgather, "allgather of objects")
    allreduce = after_plans(MPI.Intracomm.allreduce, "allreduce of objects")
    alltoall = after_plans(MPI.Intracomm.alltoall, "alltoall of objects")
    barrier = after_plans(MPI.Intracomm.barrier)
    bcast = after_plans(MPI.Intracomm.bcast, "bcast of an object")
    exscan = after_plans(MPI.Intracomm.exscan, "exscan of objects")
    gather = after_plans(MPI.Intracomm.gather, "gather of objects")
    reduce = after_plans(MPI.Intracomm.reduce, "reduce of objects")
    scan = after_plans(MPI.Intracomm.scan, "scan of objects")
    scatter = after_plans(MPI.Intracomm.scatter, "scatter of objects")
    Alltoallw = after_plans(MPI.Intracomm.Alltoallw)
