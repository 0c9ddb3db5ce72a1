"""Whose message a server serves next."""

from collections.abc import Collection, Sequence
from typing import Protocol

from mpitrain.config import ConfigError
from mpitrain.server.service_log import Pull, Push


class Turns(Protocol):
    """The order of service."""

    def next(self, ready: Collection[int]) -> int | None:
        """One of the workers whose messages can be served, or None to wait for another."""

    def served(self, done: Pull | Push) -> None:
        """This was served."""


class RoundRobin:
    """Each worker in turn: who was served comes last.

    MPI promises nothing of the kind of a receive from any source, where one worker may never be
    heard.  Here a message waits for at most one of each other worker.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._last = workers - 1

    def next(self, ready: Collection[int]) -> int | None:
        for distance in range(1, self._workers + 1):
            worker = (self._last + distance) % self._workers
            if worker in ready:
                self._last = worker
                return worker
        return None

    def served(self, done: Pull | Push) -> None:
        pass


class Logged:
    """The order of a log; it was one that could be, so nobody waits for ever."""

    def __init__(self, events: Sequence[Pull | Push], name: str) -> None:
        """``name``: the log, for errors."""
        self._events = events
        self._name = name
        self._at = 0

    def next(self, ready: Collection[int]) -> int | None:
        if self._at == len(self._events):
            if ready:
                raise ConfigError(
                    f"server.replay: {self._name} is at its end, and worker {min(ready)} sends "
                    "more; replay it with the job and the package that wrote it"
                )
            return None
        worker = self._events[self._at].worker
        return worker if worker in ready else None

    def served(self, done: Pull | Push) -> None:
        """This was served.

        Raises:
            ConfigError: something else was due, so that this is another training.
        """
        due = self._events[self._at]
        if done != due:
            raise ConfigError(
                f"server.replay: {self._name} has {_told(due)}, and there came {_told(done)}; "
                "replay it with the job and the package that wrote it"
            )
        self._at += 1


def _told(event: Pull | Push) -> str:
    kind = type(event).__name__.lower()
    lag = f", lag {event.lag}" if isinstance(event, Push) else ""
    return f"a {kind} of worker {event.worker} at clock {event.clock}, version {event.version}{lag}"
