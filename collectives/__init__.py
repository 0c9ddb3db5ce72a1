"""Collective algorithms over MPI: written once as schedules, then proved, costed, drawn and run.

Importing this package starts no MPI and needs neither mpi4py nor a GPU; names such as
:class:`Communicator` do, when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collectives.algorithms import Algorithm
from collectives.analysis.claims import register
from collectives.analysis.verify import verify
from collectives.errors import (
    CollectiveError,
    CorruptMessage,
    InvalidBuffer,
    LaunchError,
    MismatchError,
    ScheduleError,
    UnknownAlgorithm,
)
from collectives.execution.traffic import Traffic
from collectives.schedule import Schedule

if TYPE_CHECKING:
    from collectives.about import provenance
    from collectives.communicator import AnyPlan, Communicator
    from collectives.execution.transport.checked import CheckedTransport
    from collectives.execution.transport.delayed import Link, delayed
    from collectives.execution.transport.mpi import Envelope, MPITransport
    from collectives.execution.waiting import give_way
    from collectives.failure.abort import abort_on_exception
    from collectives.launchers import check_launch
    from collectives.shared_pool import SharedPool
    from collectives.sparse import sparse_allreduce

__version__ = "0.1.0"

#: Modules of the names that need MPI; each is imported on its first use.
_WHERE = {
    "AnyPlan": "collectives.communicator",
    "CheckedTransport": "collectives.execution.transport.checked",
    "Communicator": "collectives.communicator",
    "Envelope": "collectives.execution.transport.mpi",
    "Link": "collectives.execution.transport.delayed",
    "MPITransport": "collectives.execution.transport.mpi",
    "SharedPool": "collectives.shared_pool",
    "abort_on_exception": "collectives.failure.abort",
    "check_launch": "collectives.launchers",
    "delayed": "collectives.execution.transport.delayed",
    "give_way": "collectives.execution.waiting",
    "provenance": "collectives.about",
    "sparse_allreduce": "collectives.sparse",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Algorithm",
    "AnyPlan",
    "CheckedTransport",
    "CollectiveError",
    "Communicator",
    "CorruptMessage",
    "Envelope",
    "InvalidBuffer",
    "LaunchError",
    "Link",
    "MPITransport",
    "MismatchError",
    "Schedule",
    "ScheduleError",
    "SharedPool",
    "Traffic",
    "UnknownAlgorithm",
    "abort_on_exception",
    "check_launch",
    "delayed",
    "give_way",
    "provenance",
    "register",
    "sparse_allreduce",
    "verify",
]
