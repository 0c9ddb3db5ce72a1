"""The plans under way, which a rank that waits must move along."""

import os
import threading
import weakref
from typing import Protocol

from collectives.errors import CollectiveError
from collectives.execution.traffic import Traffic
from collectives.execution.waiting import give_way

#: Why a forked child makes no collective: it sees its parent's counters and connections, and would
#: give the ranks wrong numbers.
FORKED = (
    "this process was forked by a rank and is none itself; make the call on the rank, and hand the "
    "child its result"
)


class Testable(Protocol):
    """A plan, or a request of mpi4py's."""

    def Test(self) -> bool:
        """Moves it along; returns whether it is complete."""


class Part(Testable, Protocol):
    """A persistent plan, several as one, or a persistent request of mpi4py's."""

    def Start(self) -> object:
        """Starts a run."""


class Moving(Testable, Protocol):
    """A plan, which a rank that waits must move along.

    Attributes:
        among: the plans of the thread that moves it along.
    """

    among: "list[Moving]"

    def abandon(self) -> None:
        """Give it up in the middle."""


class _Here(threading.local):
    """The plans of each thread, as a plan is moved by the thread that started it."""

    def __init__(self) -> None:
        self.plans: list[Moving] = []
        self.left: list[object] = []


_HERE = _Here()


class _Forked:
    """A forked child's plans, none of which it can end."""

    def __init__(self) -> None:
        self.among: list[Moving] = []

    def Test(self) -> bool:
        raise CollectiveError(FORKED)

    def abandon(self) -> None:
        """Nothing to give up."""


class Progress:
    """The plans of one communicator that are under way.

    A rank that waits moves all plans along that its thread has started, on whatever communicator:
    another rank may wait for one of those before it comes to where this one waits.

    Attributes:
        plans: running plans of this communicator, in the order of their starts.
        left: why no further collective can be relied upon, and what to do; empty if all can.
        traffic: counts of the plans that are bound from now on, if anybody counts.
        in_child: whether this process was forked by a rank.
    """

    in_child = False

    def __init__(self) -> None:
        self.plans: list[Moving] = []
        self.left = ""
        self.traffic: Traffic | None = None
        # A thread may wait for a plan while the one that started it moves it along.
        self._moving = threading.RLock()
        _LIVE.add(self)
        if self.in_child:
            self.cut_off()

    @property
    def here(self) -> list[Moving]:
        """All plans of this thread."""
        return _HERE.plans

    def add(self, plan: Moving) -> None:
        """It starts."""
        self.plans.append(plan)
        _HERE.plans.append(plan)
        plan.among = _HERE.plans

    def adopt(self, plan: Moving) -> None:
        """This thread moves it along from now on, whoever has started it."""
        with self._moving:
            if plan in self.plans and plan.among is not _HERE.plans:
                plan.among.remove(plan)
                _HERE.plans.append(plan)
                plan.among = _HERE.plans

    def remove(self, plan: Moving) -> None:
        """It has ended, or another thread has given it up already."""
        with self._moving:
            if plan in self.plans:
                self.plans.remove(plan)
                plan.among.remove(plan)

    def advance(self) -> None:
        """Moves the plans of this thread along, lest a rank that waits for them wait for us."""
        for plan in tuple(_HERE.plans):
            plan.Test()
        give_way()

    def drain(self) -> None:
        """Ends the plans of this communicator: all ranks have started them.  After one was left in
        the middle, nobody knows whether the others can end.  Errors of :meth:`expect_rank`."""
        self.expect_rank()
        while self.plans and not self.left and not all([plan.Test() for plan in tuple(self.plans)]):
            self.advance()

    def forget(self) -> None:
        """Gives up the plans that nobody can end, as a collective was left in the middle."""
        for plan in tuple(self.plans):
            plan.abandon()

    def leave(self, what: str, error: BaseException) -> None:
        """An exception ended a collective on this rank alone: no later one can be relied upon."""
        self.left = self.left or (
            f"{what} was left in the middle by {type(error).__name__}, so the ranks' messages on "
            "this communicator no longer fit together; use algorithm='native', or a new "
            "Communicator that all ranks make"
        )

    def cut_off(self) -> None:
        """In a child that was forked: no call is left to the MPI library unseen either."""
        self.left, self._moving = FORKED, threading.RLock()  # another thread may have held it
        _HERE.plans.clear()
        self.plans[:] = [_Forked()]

    def keep(self, used: object) -> None:
        """Keeps memory that an abandoned collective may still read and write."""
        if self.left:
            self.hold(used)

    def hold(self, used: object) -> None:
        """Keeps what MPI may still read, for as long as this thread lives."""
        _HERE.left.append(used)

    def expect_rank(self) -> None:
        """Raises :class:`CollectiveError` in a child that was forked, which may not even call the
        MPI library's own."""
        if self.left is FORKED:
            raise CollectiveError(FORKED)

    def expect_whole(self) -> None:
        """Raises :class:`CollectiveError` once a collective was left in the middle, as this rank's
        next messages would meet the other ranks' last ones, and in a child that was forked."""
        if self.left:
            raise CollectiveError(self.left)


_LIVE: "weakref.WeakSet[Progress]" = weakref.WeakSet()


def _in_child() -> None:
    Progress.in_child = Progress.in_child or bool(_LIVE)
    for progress in _LIVE:
        progress.cut_off()


os.register_at_fork(after_in_child=_in_child)
