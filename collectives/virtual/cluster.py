"""Ranks as threads, of which one runs at a time, and their clocks.

A rank's clock moves on while it computes, by the CPU time of its thread or by given costs, and
jumps to the end of what it waits for.  The rank whose clock is least runs next, so that whatever
two ranks do to one another happens in the order of their clocks.  With given costs the same
program always gives the same times; ranks of equal clocks take turns by number.

A message begins when both of its ends are posted, as under MPI's rendezvous protocol, so what hangs
here can hang there.  It takes the latency of its way, and its bytes at the rate of the slowest
link; a link serves its messages one after the other.
"""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from collectives.analysis.topology import Topology
from collectives.failure.history import call_site

#: Seconds that a look at a message costs that is not there yet.
_LOOK_S = 1e-7


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


@dataclass(eq=False)
class Rank:
    """A rank.

    Attributes:
        cluster: where it is.
        number: its number in the job.
        clock: seconds since the start.
        spent: seconds of computing, communicating and waiting.
        done: ends of operations that it has not looked at since, as (end, number, operation).
        waits: the operation that it waits for; ``None``: for any, or it runs.
        state: ``"ready"``, ``"waits"`` or ``"ended"``.
        turn: how often it has been called; an entry of an earlier turn is void.
        alone: messages and collectives of this rank alone, as ``world`` of the cluster for all.
    """

    cluster: "VirtualCluster"
    number: int
    clock: float = 0.0
    spent: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("computing", "communicating", "waiting"), 0.0)
    )
    done: list[tuple[float, int, Operation]] = field(default_factory=list)
    waits: Operation | None = None
    state: str = "ready"
    turn: int = 0
    thread: threading.Thread | None = None
    error: BaseException | None = None
    result: Any = None
    alone: Any = None

    def __post_init__(self) -> None:
        self._called = threading.Lock()
        self._called.acquire()
        self._cpu = 0.0
        self._noted = 0

    def compute(self, seconds: float) -> None:
        """Moves the clock on by work."""
        self.clock += seconds
        self.spent["computing"] += seconds

    def now(self) -> float:
        """The clock, after what has been computed since the last look at it."""
        if self.cluster.measures:
            cpu = time.thread_time()
            self.compute((cpu - self._cpu) * self.cluster.slower)
            self._cpu = cpu
        return self.clock

    def arrive(self) -> float:
        """Lets all ranks of earlier clocks run first; the clock, which is then the least."""
        now = self.now()
        if self.cluster.lost is not None:
            raise self.cluster.lost
        first = self.cluster.first()
        if first is not None and first < (now, self.number):
            self._leave(now)
        return now

    def sleep(self, seconds: float) -> None:
        """Waits for some time."""
        until = self.now() + max(0.0, seconds)
        self.spent["waiting"] += until - self.clock
        self._leave(until)
        self.clock = until

    def look(self) -> None:
        """Pays for a look at something that is not there."""
        self.clock += _LOOK_S
        self.spent["waiting"] += _LOOK_S

    def idle(self) -> None:
        """Waits until any of its operations ends, or a message for it is posted."""
        self.arrive()
        if not self.done:
            self.state = "waits"
            self._leave(None)
        end, _, which = self.done[0]
        if end > self.clock:
            self.state = "waits"
            self._leave(end)
            end, _, which = self.done[0]
        self._passed(which, end)
        while self.done and self.done[0][0] <= self.clock:
            heappop(self.done)

    def wait(self, which: Operation) -> None:
        """Waits until an operation is complete."""
        self.arrive()
        if which.end is None:
            self.state, self.waits = "waits", which
            self._leave(None)
        elif which.end > self.clock:
            self._leave(which.end)
        assert which.end is not None, "nothing else calls a rank that waits"
        self._passed(which, which.end)

    def note(self, end: float, which: Operation) -> None:
        """An operation of this rank will end, or a message for it is posted."""
        self._noted += 1
        if len(self.done) > 4096:  # a rank that never idles never looks at these
            self.done = [one for one in self.done if one[0] > self.clock]
            heapify(self.done)
        heappush(self.done, (end, self._noted, which))
        if self.state == "waits" and (self.waits is None or self.waits is which):
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
        """Gives the process to the next rank, and goes on at ``until`` or when it is called."""
        if until is not None:
            self.cluster.call(self, until)
        following = self.cluster.next()
        if following is not self:
            following._called.release()
            self._called.acquire()
        self._resume()

    def _resume(self) -> None:
        self.state, self.waits, self.turn = "ready", None, self.turn + 1
        self._cpu = time.thread_time()
        if self.cluster.lost is not None:
            raise self.cluster.lost

    def run(self, program: Callable[[], Any], first: bool = False) -> None:
        """Runs the program of this rank, in this thread."""
        HERE.rank = self
        try:
            if not first:
                self._called.acquire()
            self._resume()
            self.result = program()
            self.now()
        except BaseException as error:
            self.error = error
            if self.cluster.lost is None:
                error.add_note(f"on virtual rank {self.number} of {len(self.cluster.ranks)}")
                self.cluster.lose(error if isinstance(error, Deadlock) else Lost(), self)
        self.state = "ended"
        del HERE.rank
        self.cluster.end(self)


class _ThisThread(threading.local):
    """The rank that a thread is."""

    rank: Rank


HERE = _ThisThread()


def here() -> Rank:
    """The rank of this thread.

    Raises:
        RuntimeError: the thread is none.
    """
    try:
        return HERE.rank
    except AttributeError:
        raise RuntimeError("this thread is no rank of a virtual cluster") from None


class VirtualCluster:
    """Ranks on a network.

    Attributes:
        ranks: the ranks.
        network: the model of the network.
        measures: whether computing takes the CPU time of a rank's thread; else only what
            :meth:`Rank.compute` says.
        slower: factor on that time.
        ready: ranks that can go on, as (clock, number, turn), a heap.
        lost: the exception that all ranks raise from now on.
        world: messages and collectives of all ranks.
    """

    def __init__(
        self, size: int, network: Topology, *, measures: bool = True, slower: float = 1.0
    ) -> None:
        self.network, self.measures, self.slower = network, measures, slower
        self.ranks = [Rank(self, number) for number in range(size)]
        self.ready = [(0.0, number, 0) for number in range(1, size)]
        self.lost: BaseException | None = None
        from collectives.virtual.context import Context  # starts MPI

        self.world = Context(range(size))
        for rank in self.ranks:
            rank.alone = Context([rank.number])
        self._free: defaultdict[tuple[object, int], float] = defaultdict(float)
        self._routes: dict[tuple[int, int], tuple[float, list[tuple[Any, float]]]] = {}

    def run(self, program: Callable[[], Any]) -> list[Any]:
        """Runs ``program`` on each rank; rank 0 is this thread, which hears signals.

        Returns:
            The results, by rank.

        Raises:
            BaseException: the first error of a rank; the other ranks have ended, too.
            Deadlock: all ranks wait; the message says who waits for whom, and where.
        """
        others = [
            threading.Thread(target=rank.run, args=(program,), name=f"rank {rank.number}")
            for rank in self.ranks[1:]
        ]
        for rank, thread in zip(self.ranks, [threading.current_thread(), *others], strict=True):
            rank.thread = thread
        for thread in others:
            thread.daemon = True
            thread.start()
        self.ranks[0].run(program, first=True)
        for thread in others:
            thread.join()
        errors = [rank.error for rank in self.ranks if rank.error is not None]
        own = [error for error in errors if not isinstance(error, Lost)]
        if own:
            raise own[0]
        return [rank.result for rank in self.ranks]

    @property
    def seconds(self) -> float:
        """When the last rank ended."""
        return max(rank.clock for rank in self.ranks)

    def call(self, rank: Rank, at: float) -> None:
        """A rank can go on at this time, unless it goes on before."""
        heappush(self.ready, (at, rank.number, rank.turn))

    def first(self) -> tuple[float, int, int] | None:
        """The rank that can go on first."""
        ready = self.ready
        while ready:
            _, number, turn = ready[0]
            rank = self.ranks[number]
            if rank.turn == turn and rank.state != "ended":
                return ready[0]
            heappop(ready)
        return None

    def next(self) -> Rank:
        """The rank that runs now."""
        if self.first() is None:
            self.lose(Deadlock(self.report()), None)
        return self.ranks[heappop(self.ready)[1]]

    def lose(self, error: BaseException, teller: Rank | None) -> None:
        """Ends all ranks: each raises ``error`` where it is."""
        self.lost = error
        for rank in self.ranks:
            if rank.state == "waits" and rank is not teller:
                self.call(rank, rank.clock)

    def end(self, rank: Rank) -> None:
        """A rank has ended; the next one runs."""
        if self.first() is not None or any(other.state == "waits" for other in self.ranks):
            self.next()._called.release()

    def report(self) -> str:
        """Who waits for whom, and where: a line for each rank that has not ended."""
        frames = sys._current_frames()
        lines = ["all ranks wait, and nothing can end that:"]
        for rank in self.ranks:
            if rank.state != "waits":
                lines.append(f"  rank {rank.number} has ended")
                continue
            what = rank.waits.what if rank.waits else "polls, and nothing of its own is under way"
            if missing := [str(peer) for peer in rank.waits.peers()] if rank.waits else []:
                some = ", ".join(missing[:8]) + (" and others" if len(missing) > 8 else "")
                what += f", and waits for rank{'s' if len(missing) > 1 else ''} {some}"
            code, line = call_site(frames.get(rank.thread.ident or 0) if rank.thread else None)
            place = f", at {code.co_filename}:{line} in {code.co_name}" if code else ""
            lines.append(f"  rank {rank.number} {what}{place}")
        return "\n".join(lines)

    def table(self) -> str:
        """The time of each rank, for people."""
        lines = ["  rank    seconds  computing  communicating  waiting"]
        for rank in self.ranks:
            total = sum(rank.spent.values())
            shares = [seconds / (total or 1.0) for seconds in rank.spent.values()]
            told = "{:10.1%} {:14.1%} {:8.1%}".format(*shares)
            lines.append(f"{rank.number:6} {total:10.6f} {told}")
        return "\n".join(lines)

    def transfer(self, source: int, target: int, nbytes: int, now: float) -> tuple[float, float]:
        """When a message of ranks that are ready ``now`` begins and ends."""
        latency, links = self._route(source, target)
        begin = max([now, *(self._free[link] for link, _ in links)])
        longest = 0.0
        for link, seconds in links:
            self._free[link] = begin + nbytes * seconds
            longest = max(longest, nbytes * seconds)
        return begin, begin + latency + longest

    def _route(self, source: int, target: int) -> tuple[float, list[tuple[Any, float]]]:
        """Latency of a way, and the links on it with their seconds a byte."""
        if source == target:
            return 0.0, []
        found = self._routes.get((source, target))
        if found is None:
            ends = np.array([source]), np.array([target])
            beta = float(self.network.beta(*ends)[0])
            links: list[tuple[Any, float]] = [(("out", source), beta), (("in", target), beta)]
            for kind, (used, seconds) in enumerate(self.network.shared(*ends)):
                links += [((kind, int(link)), seconds) for link in used[:, 0] if link >= 0]
            found = self._routes[source, target] = float(self.network.alpha(*ends)[0]), links
        return found

    def meeting(self, members: Sequence[int], nbytes: int) -> float:
        """Seconds of a collective of the library itself, whose parts have ``nbytes`` in all: a
        binomial tree over the longest way from the first member."""
        rounds = (len(members) - 1).bit_length()
        if not rounds:
            return 0.0
        first = np.full(len(members) - 1, members[0])
        others = np.array(members[1:])
        alpha = float(self.network.alpha(first, others).max())
        return rounds * alpha + nbytes * float(self.network.beta(first, others).max())
