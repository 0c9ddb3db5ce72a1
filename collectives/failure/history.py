"""Record of the last calls of a rank, cheap to keep and formatted only when somebody asks."""

import sys
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic
from types import CodeType, FrameType
from typing import Any

from collectives.failure.abort import outside

#: Calls kept per communicator.
KEPT = 64
#: Most characters of a call's name in a report, which must fit a datagram.
_LONGEST = 500


@dataclass(slots=True, eq=False)
class Entered:
    """One call: its name, its line in the user's code, and when it began and ended.

    Attributes:
        number: number of the collective that it makes, runs or waits for.
        numbered: whether all ranks make this call.
        what: parts of its name.
        outer: the call that it was made in, if any.
        code, line: place in the user's code.
        begun, ended: seconds of a clock; ``ended`` is 0 while it lasts.
    """

    number: int
    numbered: bool
    what: tuple[object, ...]
    outer: "Entered | None"
    code: CodeType | None
    line: int
    begun: float = field(default_factory=monotonic)
    ended: float = 0.0

    @property
    def site(self) -> str:
        """``file:line`` of the user's code."""
        return f"{self.code.co_filename}:{self.line}" if self.code else "unknown place"

    @property
    def words(self) -> str:
        """Collective, algorithm and size of the call, as text."""
        what = " ".join(str(part) for part in self.what if part is not None)
        return f"{what[:_LONGEST]}..." if len(what) > _LONGEST else what

    def __str__(self) -> str:
        now = monotonic()
        lasted = f"took {1e3 * (self.ended - self.begun):.3f} ms"
        if not self.ended:
            lasted = f"under way for {now - self.begun:.1f} s"
        what = f"#{self.number} {self.words}" if self.numbered else self.words
        return f"{what} at {self.site}, {now - self.begun:.1f} s ago, {lasted}"


#: Name of a collective: a word, or parts that are joined when somebody asks.
What = str | tuple[object, ...]
#: Number of a collective, its name, and when it began.
Brief = tuple[int, What, float]


class History:
    """Ring buffer of a rank's last calls on a communicator.

    Attributes:
        made: number of collective calls that this rank has made; all ranks count alike.
        completed: the highest number of a collective that has ended.
        polled: when a ``Test`` on this rank last found an unfinished collective.
        threads: threads that have made blocking calls.
    """

    def __init__(self) -> None:
        self.made = 0
        self.completed = 0
        self.polled = float("-inf")
        self.threads = set[int]()
        self._current: Entered | None = None
        self._brief: Brief | None = None
        self._read: tuple[Brief, Entered] | None = None
        self._kept: deque[Entered | Brief] = deque(maxlen=KEPT)

    @property
    def current(self) -> Entered | None:
        """The call that this rank is in, if any."""
        brief, read = self._brief, self._read
        if brief is None:
            return self._current
        if read is None or read[0] is not brief:
            self._read = read = brief, _entered(brief)
        return read[1]

    def record(
        self, what: What, call: Callable[..., None], arguments: tuple[Any, ...] = ()
    ) -> None:
        """Makes a call that is a collective, and records it: in a tenth of the time of
        :meth:`enter`, and without its place in the user's code.  One thread at a time."""
        self.made = number = self.made + 1
        if what[0] != "asynchronous":
            self.threads.add(get_ident())
        outer, self._brief = self._brief, (brief := (number, what, monotonic()))
        self._kept.append(brief)
        try:
            call(*arguments)
        finally:
            self._brief = outer
            if number > self.completed:
                self.completed = number

    def enter(self, *what: object, numbered: bool = True, of: int | None = None) -> Entered:
        """Records that a call begins.

        Args:
            *what: parts of its name, formatted later; must keep no buffer alive.
            numbered: whether all ranks make this call, so that its number is each rank's progress.
            of: number of the collective that this call runs or waits for, as ``Wait`` does.
        """
        self.threads.add(get_ident())
        if of is None:
            self.made += numbered
            of = self.made
        call = Entered(of, numbered, what, self._current, *call_site())
        self._kept.append(call)
        self._current = call
        return call

    @contextmanager
    def during(self, *what: object, **how: Any) -> Iterator[None]:
        """Records a call that lasts as long as a block; arguments as for :meth:`enter`."""
        call = self.enter(*what, **how)
        try:
            yield
        finally:
            self.leave(call)

    def leave(self, call: Entered, completes: bool = True) -> None:
        """Records that a call ended; ``completes`` is false if its collective is still running."""
        call.ended = monotonic()
        if completes and call.numbered:  # other calls have the number of the last collective
            self.complete(call.number)
        if self._current is call:
            self._current = call.outer
        else:  # another thread is still in a call that began later
            inner = self._current
            while inner is not None and inner.outer is not call:
                inner = inner.outer
            if inner is not None:
                inner.outer = call.outer
        call.outer = None

    def refuse(self, call: Entered, error: BaseException) -> None:
        """Takes back the number of a call that an error has refused before the ranks met, as the
        other ranks do not make it, or have the same error."""
        if isinstance(error, Exception) and call.numbered and self.made == call.number:
            self.made, call.numbered = self.made - 1, False

    def complete(self, number: int) -> None:
        """Records that the collective of this number has ended."""
        self.completed = max(self.completed, number)

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __str__(self) -> str:
        lines = [f"the last {len(self._kept)} collective calls, oldest first:"]
        for call in list(self._kept):
            if isinstance(call, Entered):
                lines.append(str(call))
            else:
                lines.append(
                    f"#{call[0]} {_entered(call).words}, {monotonic() - call[2]:.1f} s ago"
                )
        return "\n  ".join(lines)


def _entered(brief: Brief) -> Entered:
    number, what, begun = brief
    parts = (what,) if isinstance(what, str) else what
    return Entered(number, True, parts, None, None, 0, begun)


def call_site(
    frame: FrameType | None = None, leaving_out: Container[str] = ("collectives", "contextlib")
) -> tuple[CodeType | None, int]:
    """Code and line of the frame that :func:`outside` finds, by default from the caller's on."""
    found = outside(frame or sys._getframe(1), leaving_out)
    if found is None:
        return None, 0
    # Another thread may see a frame between two lines, which has none then.
    return found.f_code, found.f_lineno or found.f_code.co_firstlineno


def size_of(buffer: object) -> str | None:
    """``"400 bytes"``, if the size is known without parsing the buffer's specification."""
    array = buffer[0] if isinstance(buffer, list | tuple) and buffer else buffer
    nbytes = getattr(array, "nbytes", None)
    return None if nbytes is None else f"{nbytes} bytes"
