"""The finding of a check, and how all ranks come to the same one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives.errors import words


class Status(Enum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """A check's result; ``fix`` is advice in one sentence, empty if nothing has to be done."""

    status: Status
    text: str
    fix: str = ""
    name: str = ""


def ok(text: str) -> Finding:
    return Finding(Status.OK, text)


def warn(text: str, fix: str) -> Finding:
    return Finding(Status.WARN, text, fix)


def fail(text: str, fix: str) -> Finding:
    return Finding(Status.FAIL, text, fix)


Check = Callable[[MPI.Intracomm, Path], Finding]
#: Makes the finding from the results of all ranks, in rank order; a pure function.
Judge = Callable[[list[Any]], Finding]
#: A part of a check; its argument is the result of the part before it on this rank.
Part = Callable[[Any], Any]

_FIX = "see the message; the check itself failed"


def gathered(comm: MPI.Intracomm, name: str, local: Callable[[], Any], judge: Judge) -> Finding:
    """Run ``local``, which must not communicate, on each rank and judge the results of all ranks.

    An exception in either makes the check fail on all ranks; collective.
    """
    return in_parts(comm, name, [lambda _: local()], judge)


def in_parts(
    comm: MPI.Intracomm, name: str, parts: Sequence[Part], judge: Judge, fix: str = _FIX
) -> Finding:
    """Run a check of several parts, each on all ranks or on none; collective.

    A part begins when the one before it has succeeded on all ranks.  Work that can fail on one rank
    and work that communicates belong in different parts: then no rank waits for one that has
    failed.

    Args:
        parts: functions of one argument; the first gets ``None``. All ranks get the result of the
            last one, which must therefore be picklable.
        judge: makes the finding from the last part's results of all ranks.
        fix: advice for an exception in a part.
    """
    own: Any = None
    for part in parts:
        problem = None
        try:
            own = part(own)
        except Exception as error:
            problem = f"rank {comm.rank}: {words(error)}"
        problems = [one for one in comm.allgather(problem) if one]
        if problems:
            others = f" (and {len(problems) - 1} more ranks)" if problems[1:] else ""
            return Finding(Status.FAIL, problems[0] + others, fix, name)
    found = comm.allgather(own)
    try:
        return replace(judge(found), name=name)
    except Exception as error:
        return Finding(Status.FAIL, words(error), _FIX, name)


def runs_of(numbers: Sequence[int]) -> str:
    """Rising numbers in short: ``0-3, 8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def leader(comm: MPI.Intracomm) -> int:
    """The lowest rank on this rank's node; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest: int = node.bcast(comm.rank)
    node.Free()
    return lowest
