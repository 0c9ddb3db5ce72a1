"""Collective algorithms over MPI: written once as schedules, then proved, costed, drawn and run.

Importing this package starts no MPI and needs neither mpi4py nor a GPU; :class:`Communicator` and
:mod:`collectives.launch` do, when they are first used.
"""

from typing import TYPE_CHECKING, Any

from collectives.algorithms import Algorithm
from collectives.analysis.own import register
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
from collectives.schedule import Schedule

if TYPE_CHECKING:
    from collectives.communicator import Communicator

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Communicator":
        from collectives.communicator import Communicator

        return Communicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Algorithm",
    "CollectiveError",
    "Communicator",
    "CorruptMessage",
    "InvalidBuffer",
    "LaunchError",
    "MismatchError",
    "Schedule",
    "ScheduleError",
    "UnknownAlgorithm",
    "register",
    "verify",
]
