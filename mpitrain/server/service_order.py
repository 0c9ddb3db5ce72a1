"""A server's order of service: that of the workers' messages or of a log, and its own log."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from mpitrain.config import ConfigError
from mpitrain.server.service_log import (
    Begun,
    Pull,
    Push,
    ReplayedLog,
    ServiceLog,
    name,
    remove_others,
)


class Turns(Protocol):
    """The order of service between two meetings."""

    def next(self, ready: Collection[int]) -> int | None:
        """The worker to serve, among those whose messages can be; None: wait for another one."""

    def served(self, done: Pull | Push) -> None:
        """Note a message that was served."""


class RoundRobin:
    """Each worker in turn: a worker that was served comes last.

    MPI promises no fairness of receives from any source: one worker might never be heard.  Here a
    message waits for at most one of each other worker.
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
    """The order of a log, which is possible, so that nobody waits for ever."""

    def __init__(self, events: Sequence[Pull | Push], name: str) -> None:
        """``name``: name of the log in errors."""
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
        """Note a message that was served.

        Raises:
            ConfigError: another one was due, so that this is another training.
        """
        due = self._events[self._at]
        if done != due:
            raise ConfigError(
                f"server.replay: {self._name} has {_text(due)}, and there came {_text(done)}; "
                "replay it with the job and the package that wrote it"
            )
        self._at += 1


def _text(event: Pull | Push) -> str:
    kind = type(event).__name__.lower()
    lag = f", lag {event.lag}" if isinstance(event, Push) else ""
    return f"a {kind} of worker {event.worker} at clock {event.clock}, version {event.version}{lag}"


def check_folders(replay: str, folder: Path) -> None:
    """Raise :class:`ConfigError` if a run would be replayed into its own folder."""
    if replay and Path(replay).resolve() == folder.resolve():
        raise ConfigError(
            f"server.replay = {replay!r} is this run's own run.dir, whose log it would replace; "
            "set another run.dir"
        )


class ServiceOrder:
    """The order of one server, from meeting to meeting."""

    def __init__(self, folder: Path, replay: str, begun: Begun) -> None:
        """Read the log that is to be replayed.

        Args:
            folder: folder of the run.
            replay: folder of the run that is replayed, or empty.
            begun: first line of the server's own log.

        Raises:
            ConfigError: the log cannot be read, or is of another training.
        """
        self._folder = folder
        self._begun = begun
        self._log: ServiceLog | None = None
        self._replayed: ReplayedLog | None = None
        if replay:
            self._replayed = ReplayedLog(Path(replay) / name(begun.server))
            self._replayed.expect(begun)

    def turns(self, first: int, stop: int) -> Turns:
        """The order for the batches ``first <= i < stop``; the first call begins the own log.

        Raises:
            ConfigError: the replayed log does not have them.
            LogError: the own log cannot be written.
        """
        if self._log is None:
            if self._begun.server == 0 and first == 0:
                remove_others(self._folder, self._begun.servers)
            path = self._folder / name(self._begun.server)
            self._log = ServiceLog(path, replace(self._begun, step=first))
        if self._replayed:
            return Logged(self._replayed.window(first, stop), str(self._replayed.path))
        return RoundRobin(self._begun.workers)

    def write(self, first: int, stop: int, events: Sequence[Pull | Push]) -> None:
        """Log the messages that were served.

        Raises:
            LogError: the log cannot be written.
        """
        if self._log:
            self._log.add(first, stop, events)

    def close(self) -> None:
        """Close the own log."""
        if self._log:
            self._log.close()
