"""Pinned host memory that the messages of all plans of a transport take turns with.

With memory of its own for each message, a ring all-reduce of s bytes on p ranks would pin about
4 s (p-1)/p bytes for each plan, for as long as the plan lives.  So a message has some only while it
moves: as much is pinned as messages were ever under way at once, 2 s/p bytes of a ring.
"""

import weakref
from typing import NamedTuple

from collectives.execution.device_plan import Event
from collectives.execution.memory import DeviceMemory
from collectives.execution.transport import Bytes

#: Pieces have this many bytes, or a power of two more.
_LEAST_BYTES = 4 << 10


class Bounce(NamedTuple):
    """A piece of pinned memory, and the event after which the device uses it no more."""

    host: Bytes
    free: Event


class Bounces:
    """The pieces that no message has.

    A message never waits for one: a rank that did could be the one that the others wait for.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._idle: dict[int, list[Bounce]] = {}
        self._all: list[Bounce] = []
        # CuPy's pool may give pinned memory to others while the device still copies from it.
        weakref.finalize(self, _settle, self._all).atexit = False

    def take(self, nbytes: int) -> Bounce:
        """A piece of ``nbytes`` at least, which no copy uses any more."""
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        idle = self._idle.setdefault(size, [])
        for at in range(len(idle) - 1, -1, -1):
            if idle[at].free.done:
                return idle.pop(at)
        bounce = Bounce(self.memory.pinned(size), self.memory.event())
        self._all.append(bounce)
        return bounce

    def give(self, bounce: Bounce) -> None:
        """Another message may have it once what is queued now is done."""
        bounce.free.record()
        self._idle[len(bounce.host)].append(bounce)

    @property
    def nbytes(self) -> int:
        """Pinned in all."""
        return sum(len(bounce.host) for bounce in self._all)


def _settle(bounces: list[Bounce]) -> None:
    for bounce in bounces:
        bounce.free.synchronize()
