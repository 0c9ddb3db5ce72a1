"""The nonblocking and the persistent collectives, made from the blocking ones.

Each has the signature of its blocking method, for readers of code and for those who ask Python.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec

from mpi4py import MPI

from collectives.calls.arguments import collective_of
from collectives.calls.engine import AnyPlan, Begun, Engine
from collectives.calls.methods.blocking import Blocking
from collectives.calls.native_plan import NativeRequest

P = ParamSpec("P")
log = logging.getLogger("collectives")


class _Form(Blocking):
    """The blocking methods, which hand their arguments to ``run``: another form of the call."""

    size = 1

    def __init__(self, run: Callable[..., Any]) -> None:
        self._engine: Any = self
        self.run = run

    def leaves_to_native(self, *_: Any, **__: Any) -> bool:
        """Says no: plans for several runs are parsed."""
        return False


class _Beginning(_Form):
    """The form that begins the calls of one communicator."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.begin)
        self.engine = engine
        self.size = engine.comm.size
        self.library = _LIBRARY

    def leaves_to_native(self, algorithm: Any, collective: str, *given: Any, **named: Any) -> bool:
        """As the engine does, for calls that name no algorithm and that no library gets wrong
        (:func:`~collectives.calls.native.fault_of_native`)."""
        if algorithm is not None or collective == "alltoallv":
            return False
        return self.engine.leaves_to_native(None, f"i{collective}", *given, **named)


def _begins(blocking: Callable[..., Any]) -> Callable[..., Begun]:
    """mpi4py's nonblocking form of a method, which gets the arguments of the blocking one."""
    start = getattr(MPI.Intracomm, f"I{blocking.__name__.lower()}")
    collective = collective_of(blocking.__name__)

    def begin(form: _Beginning, *given: Any) -> Any:
        engine, request = form.engine, None
        try:
            request = start(engine.comm, *given)
        except MPI.Exception:
            raise
        except Exception as error:
            log.debug("mpi4py does not take the buffers, so they are read: %s", error)
        if request is None:  # nothing has begun
            return blocking(_Form(engine.begin), *given)
        plan: Any = engine.last_plan
        return NativeRequest(request, collective, plan.reason, engine.progress, given)

    return begin


_LIBRARY = SimpleNamespace(
    **{name: _begins(form) for name, form in vars(Blocking).items() if not name.startswith("_")}
)


def _nonblocking(
    blocking: Callable[Concatenate[Any, P], None],
) -> Callable[Concatenate[Any, P], Begun]:
    """The nonblocking form of a method."""

    def method(self: "Nonblocking", *given: Any, **named: Any) -> Any:
        return blocking(self._beginning, *given, **named)

    method.__name__ = f"I{blocking.__name__.lower()}"
    method.__doc__ = f":meth:`{blocking.__name__}` under way."
    method.__signature__ = inspect.signature(blocking).replace(return_annotation=Begun)  # type: ignore[attr-defined]
    return method


def _persistent(
    blocking: Callable[Concatenate[Any, P], None],
) -> Callable[Concatenate[Any, P], AnyPlan]:
    """The persistent form of a method, which takes ``info`` behind the blocking one's arguments."""
    signature = inspect.signature(blocking)
    *own, algorithm = signature.parameters.values()
    info = inspect.Parameter("info", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=MPI.INFO_NULL)

    def method(self: "Persistent", *given: Any, **named: Any) -> Any:
        named.pop("info", None)
        return blocking(_Form(self._engine.make), *given[: len(own) - 1], **named)

    method.__name__ = f"{blocking.__name__}_init"
    method.__doc__ = f"A plan for :meth:`{blocking.__name__}`."
    parameters = [*own, info, algorithm]
    method.__signature__ = inspect.Signature(parameters, return_annotation=AnyPlan)  # type: ignore[attr-defined]
    return method


class Nonblocking:
    """Each returns a plan for one run; where the MPI library carries it out, that is an
    ``MPI.Request``, too.

    Call ``Wait`` for it, with calls of ``Test`` in between.  The buffers are the plan's until
    ``Wait`` has returned, or ``Test`` ``True``.  Buffers and errors are those of
    :class:`~collectives.calls.methods.blocking.Blocking`.
    """

    _engine: Engine

    @cached_property
    def _beginning(self) -> _Beginning:
        return _Beginning(self._engine)

    Iallreduce = _nonblocking(Blocking.Allreduce)
    Ireduce_scatter_block = _nonblocking(Blocking.Reduce_scatter_block)
    Ireduce_scatter = _nonblocking(Blocking.Reduce_scatter)
    Iallgather = _nonblocking(Blocking.Allgather)
    Iallgatherv = _nonblocking(Blocking.Allgatherv)
    Ialltoall = _nonblocking(Blocking.Alltoall)
    Ialltoallv = _nonblocking(Blocking.Alltoallv)
    Ibcast = _nonblocking(Blocking.Bcast)
    Ireduce = _nonblocking(Blocking.Reduce)
    Igather = _nonblocking(Blocking.Gather)
    Igatherv = _nonblocking(Blocking.Gatherv)
    Iscatter = _nonblocking(Blocking.Scatter)
    Iscatterv = _nonblocking(Blocking.Scatterv)
    Iscan = _nonblocking(Blocking.Scan)
    Iexscan = _nonblocking(Blocking.Exscan)
    Ibarrier = _nonblocking(Blocking.Barrier)


class Persistent:
    """Each returns a plan to be run by ``Start`` and ``Wait`` or as a function, until ``Free``.

    The plan keeps the buffers alive.  Making it is collective, as MPI's is.  ``info`` is there as
    MPI has it, and is ignored.  Buffers and errors are those of
    :class:`~collectives.calls.methods.blocking.Blocking`.
    """

    _engine: Engine

    Allreduce_init = _persistent(Blocking.Allreduce)
    Reduce_scatter_block_init = _persistent(Blocking.Reduce_scatter_block)
    Reduce_scatter_init = _persistent(Blocking.Reduce_scatter)
    Allgather_init = _persistent(Blocking.Allgather)
    Allgatherv_init = _persistent(Blocking.Allgatherv)
    Alltoall_init = _persistent(Blocking.Alltoall)
    Alltoallv_init = _persistent(Blocking.Alltoallv)
    Bcast_init = _persistent(Blocking.Bcast)
    Reduce_init = _persistent(Blocking.Reduce)
    Gather_init = _persistent(Blocking.Gather)
    Gatherv_init = _persistent(Blocking.Gatherv)
    Scatter_init = _persistent(Blocking.Scatter)
    Scatterv_init = _persistent(Blocking.Scatterv)
    Scan_init = _persistent(Blocking.Scan)
    Exscan_init = _persistent(Blocking.Exscan)
    Barrier_init = _persistent(Blocking.Barrier)
