"""Collective algorithms over MPI: written once as schedules, then proved, costed, drawn and run.

Importing this package starts no MPI and needs neither mpi4py nor a GPU; names such as
:class:`Communicator` do, when they are first used.
"""

from typing import TYPE_CHECKING

from collectives.errors import (
    CollectiveError,
    CorruptMessage,
    InvalidBuffer,
    LaunchError,
    MismatchError,
    ScheduleError,
    UnknownAlgorithm,
)
from collectives.extras import names_of

if TYPE_CHECKING:
    from collectives.about import provenance
    from collectives.algorithms import Algorithm
    from collectives.analysis.claims import register
    from collectives.analysis.verify import verify
    from collectives.communicator import AnyPlan, Communicator
    from collectives.execution.traffic import Traffic
    from collectives.execution.transport.checked import CheckedTransport
    from collectives.execution.transport.delayed import Link, delayed
    from collectives.execution.transport.mpi import Envelope, MPITransport
    from collectives.execution.waiting import give_way
    from collectives.failure.abort import abort_on_exception
    from collectives.launchers import check_launch
    from collectives.schedule import Schedule
    from collectives.shared_pool import SharedPool
    from collectives.sparse import sparse_allreduce

__version__ = "0.1.0"
__getattr__, __dir__ = names_of(
    __name__,
    {
        "collectives.about": "provenance",
        "collectives.algorithms": "Algorithm",
        "collectives.analysis.claims": "register",
        "collectives.analysis.verify": "verify",
        "collectives.communicator": "AnyPlan Communicator",
        "collectives.execution.traffic": "Traffic",
        "collectives.execution.transport.checked": "CheckedTransport",
        "collectives.execution.transport.delayed": "Link delayed",
        "collectives.execution.transport.mpi": "Envelope MPITransport",
        "collectives.execution.waiting": "give_way",
        "collectives.failure.abort": "abort_on_exception",
        "collectives.launchers": "check_launch",
        "collectives.schedule": "Schedule",
        "collectives.shared_pool": "SharedPool",
        "collectives.sparse": "sparse_allreduce",
    },
)
__all__ = [
    "Algorithm", "AnyPlan", "CheckedTransport", "CollectiveError", "Communicator",
    "CorruptMessage", "Envelope", "InvalidBuffer", "LaunchError", "Link", "MPITransport",
    "MismatchError", "Schedule", "ScheduleError", "SharedPool", "Traffic", "UnknownAlgorithm",
    "abort_on_exception", "check_launch", "delayed", "give_way", "provenance", "register",
    "sparse_allreduce", "verify",
]  # fmt: skip
