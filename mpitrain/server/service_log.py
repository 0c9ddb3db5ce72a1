"""A server's log of pulls and pushes, a line each, in the order of service.

``server-0.jsonl`` in the run's folder begins with a :class:`Begun`.  A :class:`LoggedWindow` is the
time between two meetings of all ranks; the lines after it are the messages served in it.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mpitrain.config import Config, ConfigError
from mpitrain.files import check_regular
from mpitrain.ranks.together import SharedError

_FORMAT = 1


class LogError(SharedError):
    """A log cannot be written; the message names the file and why."""


class Begun(Struct, frozen=True, forbid_unknown_fields=True, tag="begun", tag_field="event"):
    """The beginning or resumption of a run.

    Attributes:
        format: number of this file's format.
        server, servers: number of the server, and of all servers.
        workers: number of groups of workers that push.
        step: steps that were done.
        job: settings of the job that decide the numbers, by key.
    """

    format: int
    server: int
    servers: int
    workers: int
    step: int
    job: dict[str, Any]


class LoggedWindow(
    Struct, frozen=True, forbid_unknown_fields=True, tag="window", tag_field="event"
):
    """The batches ``first <= i < stop`` between two meetings; ``events`` lines follow."""

    first: int
    stop: int
    events: int


class Pull(Struct, frozen=True, forbid_unknown_fields=True, tag="pull", tag_field="event"):
    """A worker was sent the parameters.

    Attributes:
        worker: group of workers.
        clock: batch for which the parameters are.
        version: pushes applied to the parameters since the last meeting.
    """

    worker: int
    clock: int
    version: int


class Push(Struct, frozen=True, forbid_unknown_fields=True, tag="push", tag_field="event"):
    """A worker's gradient was applied; with ``bound = 0``, when the last one of its clock came.

    Attributes:
        worker: group of workers.
        clock, clocks: first batch, and number of batches.
        pulled: version of the parameters on which the gradient was computed.
        version: pushes that were served before it, since the last meeting.
        lag: number of these pushes that the parameters lack.
        behind: clocks of the slowest worker that the parameters lack, at most ``bound``: the own
            clock less the slowest one's at the pull.
    """

    worker: int
    clock: int
    clocks: int
    pulled: int
    version: int
    lag: int
    behind: int


Event = Begun | LoggedWindow | Pull | Push


def name(server: int) -> str:
    """File name of a server's log in the run's folder."""
    return f"server-{server}.jsonl"


def remove_others(folder: Path, servers: int) -> None:
    """Delete logs of an earlier run with more servers; ``LogError``: one cannot be deleted."""
    for path in folder.glob("server-*.jsonl"):
        number = path.stem.removeprefix("server-")
        if number.isdecimal() and path.name == name(int(number)) and int(number) >= servers:
            try:
                path.unlink()
            except OSError as error:
                raise LogError(f"{path} cannot be removed: {error.strerror}") from error


def decisive(job: Config, data: str) -> dict[str, Any]:
    """Settings of a job that decide its numbers and meetings, by key.

    ``data`` is the data's digest.
    """
    tables = msgspec.json.decode(msgspec.json.encode(job))  # as the log's reader sees it
    for table, keys in {
        "run": ("dir", "log_every", "check_every", "tensorboard", "trace"),
        "data": ("path", "workers"),
        "train": ("steps",),
        "server": ("replay",),
        "checkpoint": ("keep", "background", "best"),
        "parallel": ("overlap",),
    }.items():
        for key in keys:
            tables[table].pop(key)
    tables.pop("evaluate")
    found = {f"{table}.{key}": v for table, keys in tables.items() for key, v in keys.items()}
    return {**found, "data": data}


class ServiceLog:
    """The log that a server writes, a window at a time."""

    def __init__(self, path: Path, begun: Begun) -> None:
        """Keep the log up to ``begun.step``, and begin.

        Raises:
            LogError: it cannot be written.
        """
        self._path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept = b"".join(_until(path, begun.step)) if begun.step and path.exists() else b""
            beside = path.with_suffix(".unfinished")
            beside.unlink(missing_ok=True)
            beside.write_bytes(kept)
            beside.rename(path)
            self._file = FileIO(path, "a")
        except OSError as error:
            raise LogError(self._why(error)) from error
        self._write([begun])

    def add(self, first: int, stop: int, events: Sequence[Pull | Push]) -> None:
        """Write a window and the messages served in it.

        Raises:
            LogError: they cannot be written.
        """
        self._write([LoggedWindow(first, stop, len(events)), *events])

    def _write(self, lines: Sequence[Event]) -> None:
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise LogError(self._why(error)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _why(self, error: OSError) -> str:
        return (
            f"{self._path} cannot be written: {error.strerror}; make room or choose another "
            "run.dir, and train --resume goes on from the newest checkpoint"
        )


class ReplayedLog:
    """An existing log, by windows.

    Attributes:
        path: the file.
        begun: the runs in it.
    """

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            ConfigError: it cannot be read, or is no log of a server.
        """
        self.path = path
        self.begun: list[Begun] = []
        self._windows: dict[int, tuple[LoggedWindow, list[Pull | Push]]] = {}
        events: list[Pull | Push] = []
        for event in _read(path):
            match event:
                case Begun():
                    self.begun.append(event)
                case LoggedWindow():
                    events = []
                    self._windows[event.first] = event, events
                case _:
                    events.append(event)
        if not self.begun:
            raise ConfigError(f"server.replay: {path} is empty; it is no log of a server")

    def expect(self, mine: Begun) -> None:
        """Check that the log is of the same training.

        Raises:
            ConfigError: it is of another training.
        """
        for begun in self.begun:
            for what in ("format", "server", "servers", "workers"):
                then, now = getattr(begun, what), getattr(mine, what)
                if then != now:
                    raise ConfigError(
                        f"server.replay: {self.path} has {what} = {then}, and this run {now}; "
                        "replay it on as many ranks, with the same [server] table"
                    )
            for key, now in mine.job.items():
                then = begun.job.get(key)
                if then != now:
                    raise ConfigError(
                        f"server.replay: {self.path} is of another training: {key} was {then!r}, "
                        f"and is {now!r}"
                    )

    def window(self, first: int, stop: int) -> Sequence[Pull | Push]:
        """The messages served in a window.

        Raises:
            ConfigError: the log does not have the window.
        """
        whole = {f: w for f, w in self._windows.items() if len(w[1]) == w[0].events}
        found = whole.get(first)
        if found is None:
            ends = [window.stop for window, _ in whole.values()]
            raise ConfigError(
                f"server.replay: {self.path} has nothing after step {first}; the last step in "
                f"it is {max(ends, default=0)}: set train.steps to that"
            )
        if found[0].stop != stop:
            raise ConfigError(
                f"server.replay: in {self.path} the ranks met after steps {first} and "
                f"{found[0].stop}, and this job meets after {stop}; set train.steps = "
                f"{found[0].stop} or as in the logged run"
            )
        return found[1]


def _read(path: Path) -> Iterator[Event]:
    try:
        check_regular(path)
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"server.replay: {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=Event)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return  # the line was cut off, as was its window
            raise ConfigError(
                f"server.replay: {path}, line {number}, is no line of a server's log: {error}"
            ) from error


def _until(path: Path, step: int) -> Iterator[bytes]:
    """The lines of a file before the first window that goes beyond a step."""
    check_regular(path)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        for line in path.read_bytes().splitlines(keepends=True):
            event = msgspec.json.decode(line, type=Event)
            if (isinstance(event, LoggedWindow) and event.stop > step) or not line.endswith(b"\n"):
                return
            yield line
