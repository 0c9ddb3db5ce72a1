"""Record of the last calls of a rank, cheap to keep and formatted only when somebody asks."""

import sys
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from time import monotonic
from types import CodeType
from typing import Any

#: Calls kept per communicator.
KEPT = 64
#: Most characters of a call's name in a report, which must fit a datagram.
_LONGEST = 500
#: Frames of these modules are not the user's code.
_NOT_THE_USER = (__name__.partition(".")[0], "contextlib")


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


class History:
    """Ring buffer of a rank's last calls on a communicator.

    Attributes:
        current: the call that this rank is in, if any.
        made: number of collective calls that this rank has made; all ranks count alike.
        completed: the highest number of a collective that has ended.
        polled: when a ``Test`` on this rank last found an unfinished collective.
    """

    def __init__(self) -> None:
        self.current: Entered | None = None
        self.made = 0
        self.completed = 0
        self.polled = float("-inf")
        self._kept: deque[Entered] = deque(maxlen=KEPT)

    def enter(self, *what: object, numbered: bool = True, of: int | None = None) -> Entered:
        """Records that a call begins.

        Args:
            *what: parts of its name, formatted later; must keep no buffer alive.
            numbered: whether all ranks make this call, so that its number is each rank's progress.
            of: number of the collective that this call runs or waits for, as ``Wait`` does.
        """
        if of is None:
            self.made += numbered
            of = self.made
        call = Entered(of, numbered, what, self.current, *call_site())
        self._kept.append(call)
        self.current = call
        return call

    def leave(self, call: Entered, completes: bool = True) -> None:
        """Records that a call ended; ``completes`` is false if its collective is still running."""
        call.ended = monotonic()
        if completes and call.numbered:  # other calls have the number of the last collective
            self.complete(call.number)
        if self.current is call:
            self.current = call.outer
        else:  # another thread is still in a call that began later
            inner = self.current
            while inner is not None and inner.outer is not call:
                inner = inner.outer
            if inner is not None:
                inner.outer = call.outer
        call.outer = None

    def complete(self, number: int) -> None:
        """Records that the collective of this number has ended."""
        self.completed = max(self.completed, number)

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __str__(self) -> str:
        lines = [f"the last {len(self._kept)} collective calls, oldest first:"]
        return "\n  ".join([*lines, *map(str, self._kept)])


def call_site(
    frame: Any = None, leaving_out: Container[str] = _NOT_THE_USER
) -> tuple[CodeType | None, int]:
    """Code and line of the innermost frame outside of some packages.

    Args:
        frame: frame to begin with; the caller's by default.
        leaving_out: names of the packages; this one by default.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in leaving_out:
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def size_of(buffer: object) -> str | None:
    """``"400 bytes"``, if the size is known without parsing the buffer's specification."""
    array = buffer[0] if isinstance(buffer, list | tuple) and buffer else buffer
    nbytes = getattr(array, "nbytes", None)
    return None if nbytes is None else f"{nbytes} bytes"
