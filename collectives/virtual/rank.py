"""A rank: a thread with a clock, and the operations that it has begun."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from collectives.virtual.generators import copy_own, remembered

if TYPE_CHECKING:
    from collectives.virtual.cluster import VirtualCluster

#: Seconds that a look at a message costs that is not there yet.
_LOOK_S = 1e-7
#: Looks in vain after which a rank that has done nothing else counts as one that waits.
_VAIN = 10_000


class Deadlock(BaseException):
    """All ranks wait; no ``Exception``, as a program that catches it could only wait again."""


class Lost(BaseException):
    """Another rank has failed, and this one ends with it."""


@dataclass(eq=False)
class Operation:
    """An operation that a rank has begun.

    Attributes:
        what: words for it, as in ``receives from rank 1``.
        peers: the ranks that it may wait for, by their number in the job.
        begun: when all ranks that it needs had come.
        end: when it is complete; ``None``: not all have come.
        result: its value.
        error: the exception that its rank gets instead.
    """

    what: str
    peers: Callable[[], list[int]]
    begun: float = 0.0
    end: float | None = None
    result: Any = None
    error: Exception | None = None

    def is_done(self, now: float) -> bool:
        return self.end is not None and self.end <= now

    def wait(self) -> None:
        here().wait(self)

    def lying(self) -> str:
        """Messages that have come and that it does not take, in words; empty: none."""
        return ""


@dataclass(eq=False)
class Rank:
    """A rank.

    Attributes:
        cluster: where it is.
        number: its number in the job.
        clock: seconds since the start.
        spent: seconds of computing, communicating and waiting.
        done: ends of operations that it has not looked at since, as (end, number, operation).
        held: steps of messages that have come while it computed, and wait for its next call.
        plans: collectives under way; any call of MPI's that looks or waits moves them on.
        waits: the operation that it waits for; ``None``: for any, or it runs.
        vain: how often it has looked in vain since it did anything else but sleep.
        looked: the operation that it has looked at last.
        state: ``"ready"``, ``"waits"`` (within a call) or ``"ended"``.
        turn: how often it has been called; an entry of an earlier turn is void.
        alone: messages and collectives of this rank alone, as ``world`` of the cluster for all.
        recorder: of its calls, where they are profiled.
    """

    cluster: "VirtualCluster"
    number: int
    clock: float = 0.0
    spent: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("computing", "communicating", "waiting"), 0.0)
    )
    done: list[tuple[float, int, Operation]] = field(default_factory=list)
    held: deque[Callable[[float], None]] = field(default_factory=deque)
    plans: list[Any] = field(default_factory=list)
    waits: Operation | None = None
    vain: int = 0
    looked: Operation | None = None
    state: str = "ready"
    turn: int = 0
    thread: threading.Thread | None = None
    error: BaseException | None = None
    result: Any = None
    alone: Any = None
    recorder: Any = None

    def __post_init__(self) -> None:
        self.called = threading.Lock()
        self.called.acquire()
        self.cpu = 0.0
        self._noted = 0
        self._moves = False

    def compute(self, seconds: float) -> None:
        """Moves the clock on by work."""
        self.clock += seconds
        self.spent["computing"] += seconds

    def now(self) -> float:
        """The clock, after what has been computed since the last look at it."""
        if self.cluster.measures:
            cpu = time.thread_time()
            self.compute((cpu - self.cpu) * self.cluster.slower)
            self.cpu = cpu
        return self.clock

    def read(self) -> float:
        """The clock, for a program that may look for a message until a time."""
        self.vain = 0
        return self.now()

    def all_s(self) -> float:
        """Seconds since the last look at the clock, in which this thread did the work of all."""
        before, self.cpu = self.cpu, time.thread_time()
        return (self.cpu - before) * self.cluster.slower * self.cluster.measures

    def arrive(self) -> float:
        """Lets all ranks of earlier clocks run first; the clock, which is then the least."""
        self.vain, self.looked = 0, None
        return self._arrive()

    def _arrive(self) -> float:
        now = self.now()
        if self.cluster.lost is not None:
            raise self.cluster.lost
        first = self.cluster.first(now)
        if first is not None and first < (now, self.number):
            self._leave(now)
        return now

    def attend(self) -> float:
        """As :meth:`arrive`, and moves on the messages that have waited for a call of this rank.

        A look and a wait do so; a post does not.
        """
        if self.plans and not self._moves:
            self._moves = True
            try:
                self.plans = [plan for plan in self.plans if not plan.Test()]
            finally:
                self._moves = False
        now = self._arrive()
        while self.held:
            self.held.popleft()(now)
        return now

    def sleep(self, seconds: float) -> None:
        """Waits for some time, outside of any call."""
        until = self.now() + max(0.0, seconds)
        self.spent["waiting"] += until - self.clock
        self._leave(until)
        self.clock = until

    def look(self, which: Operation | None) -> None:
        """Pays for a look at something that is not there.

        Raises:
            Deadlock: all ranks wait or look, and nothing can come.
        """
        self.clock += _LOOK_S
        self.spent["waiting"] += _LOOK_S
        self.vain, self.looked = self.vain + 1, which
        if self.vain % _VAIN == 0 and self.cluster.looks_only(_VAIN):
            raise self.cluster.lose_all()

    def idle(self, meant: Operation | None = None) -> None:
        """Waits until any of its operations ends, or a message for it is there.

        ``meant`` is the operation that a report names.
        """
        self.attend()
        if not self.done:
            self.state, self.waits = "waits", meant
            self._leave(None)
        end, _, which = self.done[0]
        if end > self.clock:
            self.state, self.waits = "waits", meant
            self._leave(end)
            end, _, which = self.done[0]
        self._passed(which, end)
        while self.done and self.done[0][0] <= self.clock:
            heappop(self.done)

    def wait(self, which: Operation) -> None:
        """Waits until an operation is complete."""
        self.attend()
        while self.plans and not which.is_done(self.clock):
            self.idle(which)
        if not which.is_done(self.clock):
            self.state, self.waits = "waits", which
            self._leave(which.end)
        assert which.end is not None, "nothing else calls a rank that waits"
        self._passed(which, which.end)

    def note(self, end: float, which: Operation) -> None:
        """An operation of this rank will end, or a message for it is there."""
        self.vain = 0
        self._noted += 1
        if len(self.done) > 4096:  # a rank that never idles never looks at these
            self.done = [one for one in self.done if one[0] > self.clock]
            heapify(self.done)
        heappush(self.done, (end, self._noted, which))
        if self.state == "waits" and (self.waits in (None, which) or self.plans):
            self.cluster.call(self, max(self.clock, end))

    def _passed(self, which: Operation, end: float) -> None:
        """Moves the clock to the end of an operation: it has waited, and then communicated."""
        if end <= self.clock:
            return
        begun = min(max(which.begun, self.clock), end)
        self.spent["waiting"] += begun - self.clock
        self.spent["communicating"] += end - begun
        self.clock = end

    def _leave(self, until: float | None) -> None:
        """Gives the process to the next rank, and goes on at ``until`` or when it is called.

        Raises:
            RuntimeError: it waits while it imports a module, which others may import, too.
        """
        if HERE.imports and len(self.cluster.ranks) > 1:
            if self.state == "ready":
                return
            self.state = "ready"
            raise RuntimeError(
                f"the module {HERE.imports} waits for other ranks while it is imported, and "
                "virtual ranks import a module once for all; let a function of it communicate"
            )
        if until is not None:
            self.cluster.call(self, until)
        following = self.cluster.next()
        if following is not self:
            own = remembered()  # a rank draws its own random numbers, as a process does
            following.called.release()
            self.called.acquire()
            own()
        self._resume()

    def _resume(self) -> None:
        self.state, self.waits, self.turn = "ready", None, self.turn + 1
        self.cpu = time.thread_time()
        if self.cluster.lost is not None:
            raise self.cluster.lost

    def run(self, program: Callable[[], Any], first: bool = False) -> None:
        """Runs the program of this rank, in this thread."""
        HERE.rank = self
        try:
            if not first:
                self.called.acquire()
            self.cluster.begin()
            copy_own()
            self._resume()
            try:
                self.result = program()
            except SystemExit as end:  # a process that ends well ends no other
                if end.code not in (None, 0):
                    raise
            self.attend()
        except BaseException as error:
            self.error = error
            if self.cluster.lost is None:
                error.add_note(f"on virtual rank {self.number} of {len(self.cluster.ranks)}")
                self.cluster.lose(error if isinstance(error, Deadlock) else Lost(), self)
        self.state = "ended"
        del HERE.rank
        self.cluster.end(self)


class _ThisThread(threading.local):
    """The rank that a thread is, the module that it imports, its time as it collects garbage."""

    rank: Rank
    imports, collects = "", 0.0


HERE = _ThisThread()


def here() -> Rank:
    """The rank of this thread.

    Raises:
        RuntimeError: the thread is none.
    """
    try:
        return HERE.rank
    except AttributeError:
        told = "a thread that is no virtual rank calls MPI; start this program with mpiexec"
        if threading.current_thread() is not threading.main_thread():
            os.write(2, f"{told}\n".encode())  # ranks may wait for this thread
            os._exit(1)
        raise RuntimeError(told) from None
