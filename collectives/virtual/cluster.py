"""Ranks as threads, of which one runs at a time, on the clock of a modelled network.

A rank's clock moves on while it computes, by the CPU time of its thread or by given costs, and
jumps to the end of what it waits for.  The rank whose clock is least runs next, so that whatever
two ranks do to one another happens in the order of their clocks.  With given costs the same
program always gives the same times; ranks of equal clocks take turns by number.
"""

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from collectives.analysis.topology import Topology
from collectives.run.report import times
from collectives.virtual import report
from collectives.virtual.generators import remembered
from collectives.virtual.links import Links
from collectives.virtual.rank import Deadlock, Lost, Rank


class VirtualCluster:
    """Ranks on a network.

    Attributes:
        ranks: the ranks.
        links: the links of the network.
        measures: whether computing takes the CPU time of a rank's thread; else only what
            :meth:`Rank.compute` says.
        slower: factor on that time.
        async_progress: whether messages move while ranks compute, once their receives are posted.
        eager: bytes of the longest message that leaves with its post, as over TCP in Open MPI; 0:
            each waits for its receive.
        ready: ranks that can go on, as (clock, number, turn), a heap.
        steps: next moves of messages, as (time, number, rank, move), a heap; see :meth:`within`.
        begin: takes generators of random numbers to where all ranks find them at first.
        lost: the exception that all ranks raise from now on.
        world: messages and collectives of all ranks.
    """

    def __init__(
        self,
        size: int,
        network: Topology,
        *,
        measures: bool = True,
        slower: float = 1.0,
        async_progress: bool = False,
        eager: int = 65536,
    ) -> None:
        self.links = Links(network)
        self.measures, self.slower = measures, slower
        self.async_progress, self.eager = async_progress, eager
        self.ranks = [Rank(self, number) for number in range(size)]
        self.ready = [(0.0, number, 0) for number in range(1, size)]
        self.steps: list[tuple[float, int, Rank, Callable[[float], None]]] = []
        self._numbers = count()
        self.begin = remembered()
        self.lost: BaseException | None = None
        from collectives.virtual.context import Context  # starts MPI

        self.world: Context = Context(range(size))
        for rank in self.ranks:
            rank.alone = Context([rank.number])

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
        self.begin()
        errors = [rank.error for rank in self.ranks if rank.error is not None]
        own = [error for error in errors if not isinstance(error, Lost)]
        if own:
            raise own[0]
        return [rank.result for rank in self.ranks]

    @property
    def seconds(self) -> float:
        """When the last rank ended."""
        return max(rank.clock for rank in self.ranks)

    def table(self) -> str:
        """The seconds of each rank, and its shares of computing, communicating and waiting."""
        told = "\ncomputing is CPU time here: one rank's noise is what the others wait for"
        return times({str(rank.number): rank.spent for rank in self.ranks}) + told * self.measures

    def call(self, rank: Rank, at: float) -> None:
        """A rank can go on at this time, unless it goes on before."""
        heappush(self.ready, (at, rank.number, rank.turn))

    def within(self, rank: Rank, at: float, step: Callable[[float], None]) -> None:
        """Calls ``step`` with the time at which ``rank`` is within a call, from ``at`` on."""
        heappush(self.steps, (at, next(self._numbers), rank, step))

    def tell(self, source: Rank, target: Rank, now: float, step: Callable[[float], None]) -> None:
        """Calls ``step`` once ``target`` has read a few bytes that ``source`` has sent.

        Where messages progress by themselves, that is at once.
        """
        if self.async_progress:
            step(now)
        else:
            self.within(target, self.links.after(source.number, target.number, now), step)

    def first(self, until: float = inf) -> tuple[float, int, int] | None:
        """The rank that can go on first, after the steps of messages before it and ``until``."""
        ready, steps = self.ready, self.steps
        while True:
            while ready and not self._is_valid(ready[0]):
                heappop(ready)
            if not steps or steps[0][0] > min(until, ready[0][0] if ready else inf):
                return ready[0] if ready else None
            at, _, rank, step = heappop(steps)
            if rank.state == "ready":
                rank.held.append(step)
            else:
                step(at)

    def _is_valid(self, entry: tuple[float, int, int]) -> bool:
        rank = self.ranks[entry[1]]
        return rank.turn == entry[2] and rank.state != "ended"

    def next(self) -> Rank:
        """The rank that runs now."""
        if self.first() is None:
            self.lose_all()
        return self.ranks[heappop(self.ready)[1]]

    def looks_only(self, looks: int) -> bool:
        """Whether no message moves, and each rank that can go on has looked so often in vain."""
        ready = {self.ranks[entry[1]] for entry in self.ready if self._is_valid(entry)}
        return not self.steps and all(
            rank.vain >= looks and not rank.held and all(end <= rank.clock for end, *_ in rank.done)
            for rank in ready
        )

    def lose_all(self) -> Deadlock:
        """Ends all ranks, as none can go on."""
        error = Deadlock(report.deadlock(self.ranks))
        self.lose(error, None)
        return error

    def lose(self, error: BaseException, teller: Rank | None) -> None:
        """Ends all ranks: each raises ``error`` where it is."""
        self.lost = error
        for rank in self.ranks:
            if rank.state == "waits" and rank is not teller:
                self.call(rank, rank.clock)

    def end(self, rank: Rank) -> None:
        """A rank has ended; the next one runs."""
        if self.first() is not None or any(other.state == "waits" for other in self.ranks):
            self.next().called.release()
