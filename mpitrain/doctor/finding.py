"""What a check finds."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mpi4py import MPI


class Status(Enum):
    """How it is."""

    OK = "ok"
    WARN = "look"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """A check's result.

    Attributes:
        name: of the check.
        status: how it is.
        text: what was found.
        fix: what to do, in one sentence; empty if nothing.
    """

    name: str
    status: Status
    text: str
    fix: str = ""


Check = Callable[[MPI.Intracomm, Path], Finding]


def gathered(
    comm: MPI.Intracomm, name: str, local: Callable[[], Any], judge: Callable[[list[Any]], Finding]
) -> Finding:
    """Run ``local`` on each rank and ``judge`` what all of them found, on every rank.

    An exception in either is a failed check, and no rank is left waiting for it.
    """
    try:
        own: Any = (True, local())
    except Exception as error:
        own = (False, f"rank {comm.rank}: {type(error).__name__}: {error}")
    found = comm.allgather(own)
    broken = [what for good, what in found if not good]
    if broken:
        return Finding(name, Status.FAIL, broken[0], "see the message; the check itself failed")
    try:
        return judge([what for _, what in found])
    except Exception as error:
        return Finding(name, Status.FAIL, f"{type(error).__name__}: {error}", "see the message")
