"""Blocks that wait for other ranks, as the watchdog sees them."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mpi4py import MPI

from collectives import extras
from collectives.execution.progress import Progress


class Watching:
    """The watchdogs of one communicator.

    Attributes:
        comm: the communicator.
        progress: plans that are under way.
        watchdog: watches all calls, if there is a timeout.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float | None, progress: Progress) -> None:
        self.comm = comm
        self.progress = progress
        self.watchdog = extras.Watchdog(MPI.Intracomm(comm), timeout) if timeout else None
        self._may_watch = timeout is None
        #: Watches blocks that wait for other ranks; see :meth:`watch`.
        self._block_watchdog = self.watchdog

    def watch(self) -> None:
        """Starts a watchdog of :meth:`waiting` alone if settings name no timeout.

        It sees no collectives on arrays, as ranks leave different numbers of them to MPI.
        """
        if self._may_watch and self._block_watchdog is None and self.comm.size > 1:
            self._block_watchdog = extras.Watchdog(MPI.Intracomm(self.comm))
            weakref.finalize(self, self._block_watchdog.drop).atexit = False

    def close_watchdog(self) -> None:
        """Ends the watch."""
        if self._block_watchdog is not None:
            self._block_watchdog.close()
            self._block_watchdog = self.watchdog = None

    def waiting(self, what: str, by_all: bool = True) -> AbstractContextManager[None]:
        """A block that waits for other ranks; ``by_all``: all ranks enter it, in the same order."""
        watchdog = self._block_watchdog
        return watchdog.waiting(what, numbered=by_all) if watchdog else nullcontext()

    def after_plans(self, what: str) -> AbstractContextManager[None]:
        """A block that all ranks enter, after the plans under way have ended."""
        if self._block_watchdog is None:  # ten times as fast as a generator
            self.progress.drain()
            return nullcontext()
        return self._after_plans(what)

    @contextmanager
    def _after_plans(self, what: str) -> Iterator[None]:
        with self.waiting(what):
            self.progress.drain()
            yield
