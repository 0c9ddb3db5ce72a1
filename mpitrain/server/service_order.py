"""A server's order of service: that of the workers' messages, or that of a log."""

from collections.abc import Collection, Iterator
from pathlib import Path

from mpitrain.config import ConfigError
from mpitrain.server import service_log
from mpitrain.server.service_log import Begun, Event, LoggedWindow, Pull, Push


class RoundRobin:
    """Each worker in turn: a worker that was served comes last.

    MPI promises no fairness of receives from any source: one worker might never be heard.  Here a
    message waits for at most one of each other worker.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._last = workers - 1

    def begin(self, first: int, stop: int) -> None:
        """Begin a window: the batches ``first <= i < stop`` between two meetings."""
        self._last = self._workers - 1

    def next(self, ready: Collection[int]) -> int | None:
        """The worker to serve, among those whose messages can be; None: wait for another one."""
        for distance in range(1, self._workers + 1):
            worker = (self._last + distance) % self._workers
            if worker in ready:
                self._last = worker
                return worker
        return None

    def served(self, done: Pull | Push) -> None:
        """Note a message that was served."""


class Replay(RoundRobin):
    """The order of a log, which is possible, so that nobody waits for ever."""

    def __init__(self, folder: Path, mine: Begun) -> None:
        """Read the log of the run that is replayed; ``mine``: first line of this server's own log.

        Raises:
            ConfigError: it cannot be read, is no log of a server, or is of another training.
        """
        self._path = folder / service_log.name(mine.server)
        self._windows: dict[int, tuple[LoggedWindow, list[Pull | Push]]] = {}
        self._events: list[Pull | Push] = []
        self._at = 0
        begun, events = False, self._events
        for found in _read(self._path):
            match found:
                case Begun():
                    begun = True
                    self._expect(found, mine)
                case LoggedWindow():
                    events = []
                    self._windows[found.first] = found, events
                case _:
                    events.append(found)
        if not begun:
            raise ConfigError(f"server.replay: {self._path} is empty; it is no log of a server")

    def _expect(self, then: Begun, now: Begun) -> None:
        """Check that the log is of the same training."""
        for key in ("format", "server", "servers", "workers"):
            if getattr(then, key) != getattr(now, key):
                raise ConfigError(
                    f"server.replay: {self._path} has {key} = {getattr(then, key)}, and this run "
                    f"{getattr(now, key)}; replay it on as many ranks, with the same [server] table"
                )
        for key, value in now.job.items():
            if then.job.get(key) != value:
                raise ConfigError(
                    f"server.replay: {self._path} is of another training: {key} was "
                    f"{then.job.get(key)!r}, and is {value!r}"
                )

    def begin(self, first: int, stop: int) -> None:
        """Begin a window; ``ConfigError``: the log does not have the window."""
        whole = {f: w for f, w in self._windows.items() if len(w[1]) == w[0].events}
        if first not in whole:
            ends = [window.stop for window, _ in whole.values()]
            raise ConfigError(
                f"server.replay: {self._path} has nothing after step {first}; the last step in "
                f"it is {max(ends, default=0)}: set train.steps to that"
            )
        window, self._events = whole[first]
        if window.stop != stop:
            raise ConfigError(
                f"server.replay: in {self._path} the ranks met after steps {first} and "
                f"{window.stop}, and this job meets after {stop}; set train.steps = "
                f"{window.stop} or as in the logged run"
            )
        self._at = 0

    def next(self, ready: Collection[int]) -> int | None:
        if self._at == len(self._events):
            if ready:
                raise self._mismatch(f"is at its end, and worker {min(ready)} sends more")
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
            raise self._mismatch(f"has {_text(due)}, and there came {_text(done)}")
        self._at += 1

    def _mismatch(self, why: str) -> ConfigError:
        cure = "replay it with the job and the package that wrote it"
        return ConfigError(f"server.replay: {self._path} {why}; {cure}")


def _text(event: Pull | Push) -> str:
    kind = type(event).__name__.lower()
    lag = f", lag {event.lag}" if isinstance(event, Push) else ""
    return f"a {kind} of worker {event.worker} at clock {event.clock}, version {event.version}{lag}"


def _read(path: Path) -> Iterator[Event]:
    try:
        found = service_log.lines(path)
    except OSError as error:
        raise ConfigError(f"server.replay: {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(found, 1):
        try:
            yield service_log.event(line)
        except service_log.NOT_A_LINE as error:
            if number == len(found) and not line.endswith(b"\n"):
                return  # the line was cut off, as was its window
            raise ConfigError(
                f"server.replay: {path}, line {number}, is no line of a server's log: {error}"
            ) from error
