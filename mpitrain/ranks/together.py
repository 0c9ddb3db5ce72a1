"""An error of one rank becomes an error of all, so that nobody waits for those who left."""

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

from mpi4py import MPI

from collectives.launch import aborts, end_job, note_shared
from mpitrain.ranks.shrink import is_death


class SharedError(RuntimeError):
    """An error that all ranks raise together."""


T = TypeVar("T")
#: Whose classes of errors are the same on all ranks.
_OURS = ("collectives", "mpitrain")


def together(comm: MPI.Intracomm, act: Callable[[], T], *kinds: type[Exception]) -> T:
    """What ``act`` returns on this rank, when it has returned on all of them; collective.

    Args:
        comm: the ranks.
        act: makes no collective call that others could wait in.
        kinds: errors that are told to the others; any other one ends the job.

    Raises:
        Exception: one of ``kinds``, on all ranks: the first rank's that had one.  A subclass of a
            program's own, which other ranks may not have, is named in the text.
    """
    own: Exception | None = None
    try:
        result = act()
    except kinds as error:
        own = error
    told = comm.allgather(None if own is None else (*_as(own, kinds), socket.gethostname()))
    failed = [(rank, *one) for rank, one in enumerate(told) if one]
    if not failed:
        return result
    rank, which, text, host = failed[0]
    kind = kinds[which] if isinstance(which, int) else which
    where = "" if len(failed) == comm.size else f" (rank {rank} of {comm.size}, on {host})"
    if own is not None and type(own) is kind and str(own) == text + where:
        note_shared(comm, own, rank)
        raise own
    shared = kind(text + where)
    note_shared(comm, shared, rank)
    raise shared from own


def _as(own: Exception, kinds: tuple[type[Exception], ...]) -> tuple[int | type[Exception], str]:
    """What all ranks can raise of a text alone, as its number in ``kinds`` or a class of ours; and
    the text."""
    found = type(own)
    if found in kinds:
        return kinds.index(found), str(own)
    if found.__module__.partition(".")[0] in _OURS:
        return found, str(own)
    which = next(number for number, kind in enumerate(kinds) if isinstance(own, kind))
    return which, f"{found.__name__}: {own}"


@contextmanager
def all_or_nobody(
    comm: MPI.Intracomm, wait_s: float = 5.0, alone: type[Exception] | None = None
) -> Iterator[None]:
    """An error in it is one of all ranks, or the end of the job, its traceback first; collective.

    Whoever catches an error that one rank alone has goes on, and the others wait for it for ever;
    so do they for a rank that calls ``sys.exit()``, with whatever status.  Where
    ``COLLECTIVES_ABORT`` is off, it is raised all the same.

    Args:
        comm: the ranks.
        wait_s: seconds that a rank which has failed waits for the others to fail, too.
        alone: an error that one rank has by its nature; it ends the job with its text alone.
    """
    if comm.size == 1 or not aborts():
        yield
        return
    words, own = MPI.Intracomm(comm).Dup(), os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != own:
            raise  # a child that a program has forked is no rank
        if isinstance(error, MPI.Exception) and is_death(error):
            raise  # the others have it when they wait for the dead
        if alone and isinstance(error, alone):
            end_job(comm, SystemExit(f"mpitrain: {error}"))
        if not all_here(words, wait_s):
            end_job(
                comm,
                error,
                f"The other ranks have not failed within {wait_s:g} s and wait for this "
                "one, so that the job ends here.",
            )
        if len(set(words.allgather(f"{type(error)}: {error}"))) == 1:
            note_shared(comm, error)
        words.Free()
        raise
    words.Free()


def all_here(comm: MPI.Intracomm, wait_s: float = 5.0) -> bool:
    """Whether all ranks come here within ``wait_s`` seconds, after an error that is one of all: its
    class alone is no proof, as a program's own function may raise the same on one rank."""
    others, end = MPI.Intracomm(comm).Ibarrier(), time.monotonic() + wait_s
    while not others.Test():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


class ClosedTogether(ABC):
    """Closed at the end of a ``with`` statement, by all ranks.

    After an error it stays open: closing is collective, and the other ranks may be elsewhere.
    """

    @abstractmethod
    def close(self) -> None:
        """Free what is bound to communicators; collective."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
