"""A plan that a watchdog looks at."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from collectives.failure.history import Entered

if TYPE_CHECKING:
    from collectives.failure.monitor import Watchdog


class Watched:
    """A plan whose runs and waits are watched, by the number of the call that has made it.

    Runs have no numbers of their own: a rank may ``Wait`` where another calls ``Test``.
    """

    def __init__(self, plan: Any, made: Entered, watchdog: "Watchdog") -> None:
        """``made``: the call that has made it."""
        self._plan = plan
        self._number = made.number
        self._collective, _, self._size = made.what
        self._watchdog = watchdog

    def __call__(self) -> None:
        """Runs the collective to its end."""
        with self.waiting():
            self._plan()

    def begin(self) -> Any:
        """Starts it, for one run; of a request of MPI's, that watches itself by this."""
        begun = self._plan.begin()
        if begun is self._plan:
            return self
        begun.watched = self
        return begun

    def Test(self) -> bool:
        """Makes progress; returns whether it has completed."""
        done: bool = self._plan.Test()
        self.tested(done)
        return done

    def tested(self, done: bool) -> None:
        """What a ``Test`` has found."""
        if done:
            self._watchdog.calls.complete(self._number)
        else:
            self._watchdog.calls.polled = monotonic()

    def Wait(self) -> None:
        """Completes it."""
        with self.waiting("Wait for"):
            self._plan.Wait()

    def synchronize(self) -> None:
        """Completes it; the host can read the results."""
        with self.waiting("Wait for"):
            self._plan.synchronize()

    @contextmanager
    def waiting(self, how: str | None = None) -> Iterator[None]:
        """Marks a block that waits for its run."""
        calls = self._watchdog.calls
        what = how, self._collective, self._plan.algorithm, self._size
        call = calls.enter(*what, of=self._number)
        try:
            yield
        finally:
            calls.leave(call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)
