"""Record of a rank's calls: sums by call site, and a sample of single calls.

A call of several ranks has a number that all of them find alone.  Which calls are kept depends on
the number, so all ranks keep the same ones, and a full sample is halved by one bit more of it: days
take as much memory as minutes.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

#: Roles of a rank in a call: it comes, for which others may wait; it waits for others.
CAME, WAITED = 1, 2
#: Single calls that a rank keeps: some 3 MB.
MOST = 20_000
MOST_SITES = 10_000  # later ones, of code that is made again and again, are one a method


class Kept(NamedTuple):
    """A single call: its number, seconds of a clock, number of its call site, role."""

    number: int
    begun: float
    ended: float
    site: int
    role: int


@dataclass(slots=True, eq=False)
class Site:
    """Calls of a method from one place of the program, in one thread.

    Attributes:
        before: seconds between the end of the thread's last call of any site and these calls.
        waited: seconds of waiting, once all ranks' records are put together.
        thread: 0: the main one.
        took: number of calls by algorithm and reason, where they can be ours.
    """

    number: int
    where: str
    calls: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    before: float = 0.0
    waited: float = 0.0
    thread: int = 0
    took: Counter[tuple[str, str]] = field(default_factory=Counter)


class Recorder:
    """Calls of a rank, in all its threads."""

    def __init__(self) -> None:
        self.sites: dict[tuple[str, int, int, str, int], Site] = {}
        self.kept: list[Kept] = []
        self.mask, self.last, self.main = 0, {0: time.perf_counter()}, threading.get_ident()
        self._guard = threading.Lock()

    def add(
        self, frame: FrameType, name: str, begun: float, numbers: Iterable[int], role: int
    ) -> Site:
        """A call has ended in this thread."""
        ended, thread = time.perf_counter(), threading.get_ident()
        thread *= self.main not in (thread, 0)
        code = frame.f_code
        key = code.co_filename, code.co_firstlineno, frame.f_lasti, name, thread
        site = self.sites.get(key)
        if site is None:
            file = code.co_filename.removeprefix(f"{os.getcwd()}{os.sep}")
            where = f"{name} at {file}:{frame.f_lineno}"
            if len(self.sites) >= MOST_SITES:
                key, where = ("", 0, 0, name, thread), f"{name} elsewhere"
            with self._guard:
                site = self.sites.setdefault(key, Site(len(self.sites), where, thread=thread))
        site.calls += 1
        site.seconds += ended - begun
        site.before += max(0.0, begun - self.last.get(thread, begun))
        self.last[thread] = ended
        for number in numbers:
            if not number & self.mask:
                self.kept.append(Kept(number, begun, ended, site.number, role))
        if len(self.kept) > MOST:
            self.mask = 2 * self.mask + 1
            self.kept = sample(self.kept, self.mask)
        return site


def sample(kept: Iterable[Kept], mask: int) -> list[Kept]:
    """The calls that are left in a sample."""
    return [one for one in kept if not one.number & mask]
