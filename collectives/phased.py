"""Plans one after the other, with work between them, as one plan."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from time import perf_counter

from collectives.communicator import AnyPlan, Communicator
from collectives.execution.progress import Moving, Part

__all__ = ["Part", "Phased"]


class Phased(ABC):
    """Plans one after the other with work in between, as one plan, with its methods and errors.

    The plans are bound before the first run and each has tags of its own, so that ranks may come to
    them in another order than other ranks do.  A rank that waits elsewhere moves it along, as any
    plan that is under way.

    Attributes:
        collective, algorithm, reason: as a plan has them.
        working: seconds of work between the plans in all runs so far: encoding, decoding and sums.
    """

    collective = "allreduce"
    algorithm = ""
    reason = "asked for"

    def __init__(self, comm: Communicator, plans: Sequence[AnyPlan]) -> None:
        """``plans``: all that a run may use, on ``comm``; they are freed with it."""
        self._progress = comm._engine.progress
        self.among: list[Moving] = []
        self._moves = False
        self._broken = False
        self._freed = False
        self._plans = list(plans)
        self._run: Iterator[Part] = iter(())
        self._current: Part | None = None
        self.working = 0.0

    @abstractmethod
    def phases(self) -> Iterator[Part]:
        """A run: yields the plans, and goes on when each is complete."""

    def Start(self) -> None:
        if self._freed:
            raise RuntimeError(f"{self!r} was freed; make another one")
        if self._current is not None:
            raise RuntimeError(f"{self!r} was started twice without Wait or a true Test in between")
        self._progress.expect_whole()
        self._run = self.phases()
        self._progress.add(self)
        self._go_on()

    def Test(self) -> bool:
        if self._broken:
            self._progress.expect_whole()
        if self._moves:  # a part of it waits, and moves along what is under way
            return False
        self._moves = True
        try:
            while self._current is not None:
                if not self._current.Test():
                    return False
                self._go_on()
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self._moves = False
        return True

    def Wait(self, status: object = None) -> None:
        self._progress.adopt(self)
        while not self.Test():
            self._progress.advance()

    def abandon(self) -> None:
        self._progress.keep((self._run, self._current))  # messages may still arrive in it
        self._current, self._broken = None, True
        self._progress.remove(self)

    def Free(self) -> None:
        if self._current is not None:
            raise RuntimeError(f"{self!r} is under way; Wait for it before Free")
        self._freed = True
        while self._plans:
            self._plans.pop().Free()

    def __repr__(self) -> str:
        return f"<{self.collective} by {self.algorithm}>"

    def _leave(self, error: BaseException) -> None:
        self._progress.leave(f"the {self!r}", error)
        self.abandon()

    def _go_on(self) -> None:
        begin = perf_counter()
        try:
            self._current = next(self._run, None)
            if self._current is not None:
                self._current.Start()
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self.working += perf_counter() - begin
        if self._current is None:
            self._progress.remove(self)
