"""The plans under way, which a rank that waits must move along."""

import threading
from typing import Protocol

from collectives.errors import CollectiveError
from collectives.execution.traffic import Traffic
from collectives.execution.waiting import give_way


class Moving(Protocol):
    """A plan, which a rank that waits must move along.

    Attributes:
        among: the plans of the thread that moves it along.
    """

    among: "list[Moving]"

    def Test(self) -> bool:
        """Move it along; whether it is complete."""

    def abandon(self) -> None:
        """Give it up in the middle."""


class _Here(threading.local):
    """The plans of each thread, as a plan is moved by the thread that started it."""

    def __init__(self) -> None:
        self.plans: list[Moving] = []
        self.left: list[object] = []


_HERE = _Here()


class Progress:
    """The plans of one communicator that are under way.

    A rank that waits moves all plans along that its thread has started, on whatever communicator:
    another rank may wait for one of those before it comes to where this one waits.

    Attributes:
        plans: running plans of this communicator, in the order of their starts.
        left: which collective was left in the middle, and by what exception; empty if none was.
        traffic: counts of the plans that are bound from now on, if anybody counts.
    """

    def __init__(self) -> None:
        self.plans: list[Moving] = []
        self.left = ""
        self.traffic: Traffic | None = None

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
        if plan in self.plans and plan.among is not _HERE.plans:
            plan.among.remove(plan)
            _HERE.plans.append(plan)
            plan.among = _HERE.plans

    def remove(self, plan: Moving) -> None:
        """It has ended."""
        self.plans.remove(plan)
        plan.among.remove(plan)

    def advance(self) -> None:
        """Moves the plans of this thread along, lest a rank that waits for them wait for us."""
        for plan in tuple(_HERE.plans):
            plan.Test()
        give_way()

    def drain(self) -> None:
        """Ends the plans of this communicator: all ranks have started them.  After one was left in
        the middle, nobody knows whether the others can end."""
        while self.plans and not self.left and not all([plan.Test() for plan in tuple(self.plans)]):
            self.advance()

    def forget(self) -> None:
        """Gives up the plans that nobody can end, as a collective was left in the middle."""
        for plan in tuple(self.plans):
            plan.abandon()

    def leave(self, what: str, error: BaseException) -> None:
        """An exception ended a collective on this rank alone: no later one can be relied upon."""
        self.left = self.left or f"{what} was left in the middle by {type(error).__name__}"

    def keep(self, used: object) -> None:
        """Keeps memory that an abandoned collective may still read and write."""
        if self.left:
            _HERE.left.append(used)

    def expect_whole(self) -> None:
        """Raises :class:`CollectiveError` once a collective was left in the middle: this rank's
        next messages would meet the other ranks' last ones."""
        if self.left:
            raise CollectiveError(
                f"{self.left}, so the ranks' messages on this communicator no longer fit together; "
                "use algorithm='native', or a new Communicator that all ranks make"
            )
