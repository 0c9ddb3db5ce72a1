"""A collective that is bound to its buffers: the calls that carry it out, and their progress."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from collectives.errors import CorruptMessage
from collectives.transport import Request

Action = Callable[[], object]


@dataclass
class BoundRound:
    """One round, as the calls that carry it out.

    Attributes:
        starts: start the messages, then make the local copies.
        requests: the messages, for polling.
        finish: the waits, each reduction as early as its operands allow.
        reductions: the reductions alone, for after a successful poll.
    """

    starts: list[Action] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    finish: list[Action] = field(default_factory=list)
    reductions: list[Action] = field(default_factory=list)


class Plan:
    """A collective that is bound to its buffers; MPI would call it a persistent request.

    Call it to run it, or ``Start`` it, ``Test`` it now and then (nothing advances in between), and
    ``Wait`` for it.  Like any collective, all ranks must start their plans in the same order.

    Attributes:
        algorithm: name of the algorithm, with its options.
        reason: why it was chosen.
        collective: name of the collective.
        nbytes: size of the larger buffer.
    """

    def __init__(
        self,
        collective: str,
        algorithm: str,
        reason: str,
        nbytes: int,
        rounds: list[BoundRound],
        testall: Callable[[Sequence[Any]], bool],
        active: "list[Plan]",
    ) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.reason = reason
        self.nbytes = nbytes
        self._rounds = rounds
        self._testall = testall
        self._active = active
        self._program = [call for r in rounds for call in (*r.starts, *r.finish)]
        self._next = len(rounds)

        self._transient = False
        self._freed = False

    def begin(self) -> Self:
        """Starts a plan that is for one run, and frees itself at the end of it."""
        self._transient = True
        self.Start()
        return self

    def __call__(self) -> None:
        """Runs the collective to its end."""
        if self._active:  # another plan is under way, and its peers may need us to go on with it
            self.Start()
            self.Wait()
            return
        try:
            for call in self._program:
                call()
        except CorruptMessage as error:
            number = [call in (*r.starts, *r.finish) for r in self._rounds].index(True)
            raise self._placed(error, number) from error

    def Start(self) -> None:
        """Starts the first round; the buffers are not the caller's until the plan has completed."""
        if self._freed:
            raise RuntimeError(f"{self!r} was freed")
        if self._next < len(self._rounds):
            raise RuntimeError(f"{self!r} was started twice without Wait or a true Test in between")
        self._next = 0
        self._active.append(self)
        self._start_round()

    def Test(self) -> bool:
        """Goes on as far as the messages allow; returns whether the collective has completed."""
        try:
            while self._next < len(self._rounds):
                current = self._rounds[self._next]
                if current.requests and not self._testall(current.requests):
                    return False
                for call in current.reductions:
                    call()
                self._next += 1
                self._start_round()
        except CorruptMessage as error:
            raise self._placed(error, self._next) from error
        return True

    def Wait(self) -> None:
        """Completes the collective; other plans that are under way go on meanwhile."""
        while len(self._active) > 1 and not self.Test():
            for plan in tuple(self._active):
                plan.Test()
            os.sched_yield()  # a rank that we wait for may need this core
        try:
            while self._next < len(self._rounds):
                for call in self._rounds[self._next].finish:
                    call()
                self._next += 1
                self._start_round()
        except CorruptMessage as error:
            raise self._placed(error, self._next) from error

    @property
    def is_freed(self) -> bool:
        """Whether it cannot be used any more."""
        return self._freed

    @property
    def progress(self) -> int:
        """Rounds completed since ``Start``."""
        return self._next

    def Free(self) -> None:
        """Releases the requests; the plan cannot be used after it."""
        for bound in self._rounds:
            for request in bound.requests:
                request.Free()
        self._rounds, self._program, self._next = [], [self.Start], 0
        self._freed = True

    def _placed(self, error: CorruptMessage, number: int) -> CorruptMessage:
        """With the collective and the round, counted from 0."""
        where = f"{self.collective} by {self.algorithm} of {self.nbytes} bytes, round {number}"
        return CorruptMessage(f"{where}: {error}")

    def _start_round(self) -> None:
        if self._next == len(self._rounds):
            self._active.remove(self)
            if self._transient:
                self.Free()
            return
        for call in self._rounds[self._next].starts:
            call()

    def __repr__(self) -> str:
        return f"<Plan: {self.collective} by {self.algorithm} of {self.nbytes} bytes>"
