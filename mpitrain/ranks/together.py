"""Errors of one rank become errors of all ranks, so that nobody waits for a rank that left."""

import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Self, TypeVar, cast

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.failure import aborts, end_job, note_shared
from mpitrain.ranks.shrink import is_death


class SharedError(RuntimeError):
    """An error that all ranks raise together."""


T = TypeVar("T")
#: Packages whose classes of errors exist on all ranks.
_OURS = ("collectives", "mpitrain")
#: Whether this rank, which may be a thread, leaves the log to rank 0.
_is_silent = ContextVar("_is_silent", default=False)
logging.getLogger("mpitrain").addFilter(lambda line: not _is_silent.get())


def together(comm: MPI.Intracomm, act: Callable[[], T], *kinds: type[Exception]) -> T:
    """Calls ``act`` on all ranks and returns its result on this one; collective.

    Args:
        comm: the ranks.
        act: function without collective calls.
        kinds: errors that become errors of all ranks; any other one ends the job.

    Raises:
        Exception: one of ``kinds``, on all ranks: that of the first rank with one.  The text names
            a program's own subclass, which other ranks may not have.
    """
    own: Exception | None = None
    try:
        result = act()
    except kinds as error:
        own = error
    if not _any(comm, own):
        return result
    told = comm.allgather(None if own is None else (*_as(own, kinds), socket.gethostname()))
    failed = [(rank, *one) for rank, one in enumerate(told) if one]
    rank, which, text, host = failed[0]
    kind = kinds[which] if isinstance(which, int) else which
    where = "" if len(failed) == comm.size else f" (rank {rank} of {comm.size}, on {host})"
    if own is not None and type(own) is kind and str(own) == text + where:
        note_shared(comm, own, rank)
        raise own
    shared = kind(text + where)
    note_shared(comm, shared, rank)
    raise shared from own


def _any(comm: MPI.Intracomm, own: Exception | None) -> bool:
    """Whether one rank has failed: a byte of each, which needs no pickle."""
    failed = np.array([own is not None], np.uint8)
    watched = comm if isinstance(comm, Communicator) else None
    # The watchdog's report has the error of a rank for which the others never come.
    what = "allreduce of errors" + ("" if own is None else f", here {own}")
    with watched.waiting(what) if watched else nullcontext():
        comm.Allreduce(MPI.IN_PLACE, failed, op=MPI.MAX)
    return bool(failed[0])


def by_rank_0(comm: MPI.Intracomm, act: Callable[[], T], *kinds: type[Exception]) -> T:
    """Calls ``act`` on rank 0 alone and returns its result on all ranks, as :func:`together`."""
    return cast(T, comm.bcast(together(comm, lambda: comm.rank or act(), *kinds)))


def _as(own: Exception, kinds: tuple[type[Exception], ...]) -> tuple[int | type[Exception], str]:
    """Class that all ranks can raise, as its index in ``kinds`` or a class of ours; its text."""
    found = type(own)
    if found in kinds:
        return kinds.index(found), str(own)
    if found.__module__.partition(".")[0] in _OURS:
        return found, str(own)
    which = next(number for number, kind in enumerate(kinds) if isinstance(own, kind))
    return which, f"{found.__name__}: {own}"


@contextmanager
def logged_once(comm: MPI.Intracomm) -> Iterator[None]:
    """Context in which rank 0 alone writes to the log, as all ranks would write the same."""
    before = _is_silent.set(comm.rank != 0)
    try:
        yield
    finally:
        _is_silent.reset(before)


@contextmanager
def all_or_nobody(
    comm: MPI.Intracomm, wait_s: float = 5.0, alone: type[Exception] | None = None
) -> Iterator[None]:
    """Context in which an error of one rank alone ends the job, after its traceback; collective.

    Otherwise a program that catches the error, or calls ``sys.exit()``, would leave the other ranks
    waiting for ever.  With ``COLLECTIVES_ABORT`` off, errors are raised as usual.

    Args:
        comm: the ranks.
        wait_s: seconds that a failed rank waits for the others to fail, too.
        alone: an error that only one rank can have; it ends the job with its text alone.
    """
    if comm.size == 1 or not aborts():
        try:
            yield
        except Exception as error:
            if comm.size == 1:
                note_shared(comm, error)
            raise
        return
    words, own = MPI.Intracomm(comm).Dup(), os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != own:
            raise  # a forked child is no rank
        if isinstance(error, MPI.Exception) and is_death(error):
            raise  # the others get it when they wait for the dead
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
    """Whether all ranks call this within ``wait_s`` seconds, which proves that all have failed."""
    others, end = MPI.Intracomm(comm).Ibarrier(), time.monotonic() + wait_s
    while not others.Test():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


class ClosedTogether(ABC):
    """Object that all ranks close at the end of a ``with`` statement.

    After an error it stays open, as closing is collective and other ranks may be elsewhere.
    """

    @abstractmethod
    def close(self) -> None:
        """Frees everything that is bound to communicators; collective."""

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
