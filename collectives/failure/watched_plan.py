"""A plan under the eyes of a watchdog."""

from contextlib import AbstractContextManager
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.failure.history import Entered
    from collectives.failure.watchdog import Watchdog


class WatchedPlan:
    """A plan whose runs and waits are watched, under the number of the call that made it.

    Runs have no numbers, as a rank may call ``Wait`` where another calls ``Test``.  Its methods are
    those of :class:`~collectives.execution.plan.Plan`.
    """

    def __init__(self, plan: Any, made: "Entered", watchdog: "Watchdog") -> None:
        self._plan = plan
        self._number = made.number
        self._collective, _, self._size = made.what
        self._watchdog = watchdog

    def __call__(self) -> None:
        with self.waiting():
            self._plan()

    def begin(self) -> Any:
        """Starts one run; a request of MPI's gets this object as its ``watched``."""
        begun = self._plan.begin()
        if begun is self._plan:
            return self
        begun.watched = self
        return begun

    def Test(self) -> bool:
        done: bool = self._plan.Test()
        self.tested(done)
        return done

    def tested(self, done: bool) -> None:
        if done:
            self._watchdog.calls.complete(self._number)
        else:
            self._watchdog.calls.polled = monotonic()

    def Wait(self, status: object = None) -> None:
        with self.waiting("Wait for"):
            self._plan.Wait()

    def synchronize(self) -> None:
        with self.waiting("Wait for"):
            self._plan.synchronize()

    def waiting(self, how: str | None = None) -> AbstractContextManager[None]:
        what = how, self._collective, self._plan.algorithm, self._size
        return self._watchdog.calls.during(*what, of=self._number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)
