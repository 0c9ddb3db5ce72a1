"""A collective that is bound to its buffers: the calls that carry it out, and their progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Self

from collectives import extras
from collectives.errors import CorruptMessage, MismatchError
from collectives.execution.memory import HOST, Memory, is_queued
from collectives.execution.progress import Moving, Progress
from collectives.execution.tags import Tags
from collectives.execution.transport import Request

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

    def add(self, requests: Sequence[Request], *actions: Action) -> None:
        """Lets the round wait for messages, and then do what they allow."""
        self.requests += requests
        self.finish += [*(request.Wait for request in requests), *actions]
        self.reductions += actions


@dataclass(frozen=True)
class Binding:
    """How a plan runs, whatever its schedule and buffers.

    Attributes:
        progress: the plans of the same communicator that are under way.
        tags: tell its messages and counters from those of other plans under way.  ``None`` for
            blocking calls, which follow one another and share theirs.
        met: whether the ranks have just met whenever it runs, so that each knows all to be in it.
        keep: takes a plan for one run, as another plan, at the end of that run.  The caller's
            memory stays until then.
    """

    reason: str = "asked for"
    progress: Progress = field(default_factory=Progress)
    tags: Tags | None = None
    memory: Memory = HOST
    met: bool = False
    keep: "Callable[[Plan], object] | None" = None

    @property
    def borrows(self) -> bool:
        """Whether the plan names the caller's memory by address, and does not keep it."""
        return self.tags is None or self.keep is not None


class Plan:
    """A collective that is bound to its buffers; MPI would call it a persistent request.

    Call it to run it, or ``Start`` it, ``Test`` it now and then (nothing advances in between), and
    ``Wait`` for it.  Like any collective, all ranks must start their plans in the same order.

    An exception in the middle of it, of a signal handler for one, leaves the ranks parted: its
    communicator's collectives then raise :class:`~collectives.CollectiveError`.

    Attributes:
        algorithm: name of the algorithm, with its options.
        reason: why it was chosen.
        nbytes: size of the larger buffer.
        own_nbytes: size of the memory that the plan itself has, at most.
        rounds: its rounds, for a plan that has it as a part.
        is_freed: whether it cannot be used any more.
        keep: takes a plan for one run, as another plan, at the end of that run.
    """

    def __init__(
        self,
        collective: str,
        algorithm: str,
        nbytes: int,
        rounds: list[BoundRound],
        testall: Callable[[Sequence[Any]], bool],
        binding: Binding,
    ) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.reason = binding.reason
        self.nbytes = self.own_nbytes = nbytes
        self.rounds = rounds
        self._testall = testall
        self._progress = binding.progress
        self._tags = binding.tags
        self._program = [call for r in rounds for call in (*r.starts, *r.finish)]
        self._next = len(rounds)
        self.keep = binding.keep
        self._transient = False
        self.is_freed = False
        self._broken = False
        #: The plans of the thread that moves it along.
        self.among: list[Moving] = []
        # Only one thread at a time moves it along.
        self._turn = Lock()

    def begin(self) -> Self:
        """Starts a plan that is for one run, and frees itself at the end of it."""
        self._transient = True
        self.Start()
        return self

    def __call__(self) -> None:
        """Runs the collective to its end.

        Raises:
            CollectiveError: a collective of this communicator was left in the middle before.
        """
        # Another plan is under way, and its peers may need us to go on with it; or this one is.
        if self._progress.here or self._progress.left or self.is_freed:
            self.Start()
            self.Wait()
            return
        try:
            for call in self._program:
                call()
        except BaseException as error:
            steps = [(*r.starts, *r.finish) for r in self.rounds]
            number = next((n for n, calls in enumerate(steps) if call in calls), 0)
            self._leave(error, number)
            raise

    def Start(self) -> None:
        """Starts the first round; the buffers are not the caller's until the plan has completed.

        Raises:
            RuntimeError: it was freed, or is under way.
            CollectiveError: a collective of this communicator was left in the middle before.
        """
        self._progress.expect_whole()
        if self.is_freed:
            raise RuntimeError(f"{self!r} was freed; make another one")
        if self.is_underway:
            raise RuntimeError(f"{self!r} was started twice without Wait or a true Test in between")
        self._next = 0
        self._progress.add(self)
        try:
            self._start_round()
        except BaseException as error:
            self._leave(error, 0)
            raise

    def Test(self) -> bool:
        """Goes on as far as the messages allow; returns whether the collective has completed.

        Raises:
            CollectiveError: it was left in the middle.
        """
        turn = False
        try:
            if self._broken:
                self._progress.expect_whole()
            turn = self._turn.acquire(blocking=False)
            if not turn:
                return False
            while self._next < len(self.rounds):
                current = self.rounds[self._next]
                if current.requests and not self._testall(current.requests):
                    return False
                for call in current.reductions:
                    call()
                self._next += 1
                self._start_round()
        except BaseException as error:
            self._leave(error, self._next)
            raise
        finally:
            if turn:
                self._turn.release()
        return True

    def Wait(self, status: object = None) -> None:
        """Completes the collective; other plans that this thread has started go on meanwhile.

        Args:
            status: mpi4py's, which says nothing of a collective and stays as it is.

        Raises:
            CollectiveError: it was left in the middle.
        """
        if self._broken:
            self._progress.expect_whole()
        self._progress.adopt(self)
        try:
            while len(self._progress.here) > 1 and not self.Test():
                self._progress.advance()
            self._finish()
        except BaseException as error:
            self._leave(error, self._next)
            raise

    def synchronize(self) -> None:
        """Completes it; the host can read the results, wherever they lie."""
        self.Wait()

    def _finish(self) -> None:
        with self._turn:
            while self._next < len(self.rounds):
                for call in self.rounds[self._next].finish:
                    call()
                self._next += 1
                self._start_round()

    @property
    def is_underway(self) -> bool:
        return self._next < len(self.rounds)

    @property
    def completed(self) -> int:
        return self._next

    def Free(self) -> None:
        """Releases the requests; the plan cannot be used after it.

        Raises:
            RuntimeError: it is under way.
        """
        if self.is_underway:
            raise RuntimeError(f"{self!r} is under way; Wait for it before Free")
        for bound in self.rounds:
            for request in bound.requests:
                request.Free()
        self._let_go()

    def _let_go(self) -> None:
        self.rounds, self._program, self._next = [], [], 0
        self._tags = None
        self.is_freed = True

    def abandon(self) -> None:
        """Gives it up in the middle: ``Wait`` and ``Test`` say so from now on."""
        self._progress.keep((self.rounds, self.keep))
        if self.is_underway:
            self._progress.remove(self)
        self.rounds, self._program, self._next = [], [], 0
        self.is_freed = self._broken = True

    def _leave(self, error: BaseException, number: int) -> None:
        """An exception ends it in round ``number``, counted from 0.

        Raises:
            CorruptMessage, MismatchError: in place of one that does not know the collective and
                the round.
        """
        if self.is_freed:  # it was left before the exception came here
            return
        where = f"{self.collective} by {self.algorithm} of {self.nbytes} bytes, round {number}"
        self._progress.leave(f"the {where},", error)
        self.abandon()
        if isinstance(error, CorruptMessage | MismatchError):
            raise type(error)(f"{where}: {error}") from error

    def _start_round(self) -> None:
        if self._next == len(self.rounds):
            self._progress.remove(self)
            if self._transient:
                self._end_run()
            return
        for call in self.rounds[self._next].starts:
            call()

    def _end_run(self) -> None:
        """Its one run is over.  Its caller may still hold it, so the next run is another plan's."""
        if self.keep is None:
            self.Free()
            return
        keep, self.keep = self.keep, None
        given = self.collective, self.algorithm, self.nbytes, self.rounds, self._testall
        again = Plan(*given, Binding(self.reason, self._progress, self._tags))
        self._let_go()
        keep(again)

    @property
    def number(self) -> int:
        """The number of its tags or counters; -1 for those of all blocking calls."""
        return -1 if self._tags is None else self._tags.number

    def __repr__(self) -> str:
        return f"<Plan: {self.collective} by {self.algorithm} of {self.nbytes} bytes>"


def plan_class(binding: Binding) -> type[Plan]:
    return extras.DevicePlan.load() if is_queued(binding.memory) else Plan
