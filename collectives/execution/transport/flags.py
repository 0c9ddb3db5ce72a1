"""Counters in shared memory, each written by one rank and polled by the others.

A rank's count says what it has done with the memory before: what it has stored is there for who
has seen the count, and what it was reading may be stored to.  x86-64 keeps loads and stores in an
order in which plain ones do.  Other processors reorder them, so there a full fence comes before the
store of a count and after the load that has seen it: with these, everything before the store is
done before everything after the load.  An aligned word of 8 bytes is stored and loaded as one on
all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from collectives.execution.plan import Action
from collectives.execution.waiting import Polled, is_contended, wait_for

#: Slots of the ranks' meetings and of blocking calls, which follow one another; slots of other
#: plans come after these.
MEETING, BLOCKING = 0, 1
#: Polls before a rank with a core of its own offers it to others: about 100 us.
_SPINS = 2000
#: Polls after which a rank that waits calls the MPI library once.
_MISSES = 8


@dataclass(slots=True, eq=False)
class RunCount:
    """Counts the runs of the plans that use a slot: the counters rise from one to the next."""

    base: int = 0
    following: int = 0

    def advance(self, ticks: int) -> None:
        """A run begins that counts up to ``ticks - 1``; all ranks must begin the same."""
        self.base = self.following
        self.following += ticks


@dataclass(slots=True, eq=False)
class Flag(Polled):
    """A condition in the shape of a request: a rank's counter has reached a value of this run.

    A rank that waits for it calls ``progress`` now and then, as another may wait for a message of
    the MPI library's that only goes on in a call of the library.  ``fence``: of a processor that
    reorders loads.
    """

    counters: memoryview
    slot: int
    runs: RunCount
    value: int
    polite: bool
    progress: Action
    fence: Action | None = None
    missed: int = 0

    def Start(self) -> None:
        """Nothing to start."""

    def Test(self) -> bool:
        if self.counters[self.slot] >= self.runs.base + self.value:
            if self.fence is not None:
                self.fence()
            return True
        self.missed += 1
        if self.missed % _MISSES == 0:
            self.progress()
        return False

    def Wait(self) -> None:
        counters, slot, wanted = self.counters, self.slot, self.runs.base + self.value
        if not (self.polite or is_contended()):
            for _ in range(_SPINS):
                if counters[slot] >= wanted:
                    if self.fence is not None:
                        self.fence()
                    return
        wait_for(self.Test)


def all_reached(flags: Sequence[Flag]) -> bool:
    """Whether all of them have, now."""
    return all(flag.Test() for flag in flags)


@dataclass(slots=True, eq=False)
class Tick:
    """An action: sets this rank's counter to a value of this run; ``fence``: of a processor that
    reorders loads and stores."""

    counters: memoryview
    slot: int
    runs: RunCount
    value: int
    fence: Action | None = None

    def __call__(self) -> None:
        if self.fence is not None:
            self.fence()
        self.counters[self.slot] = self.runs.base + self.value
