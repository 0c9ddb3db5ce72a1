"""A server's log of pulls and pushes, a line each, in the order of service.

``server-0.jsonl`` in the run's folder begins with a :class:`Begun`.  A :class:`LoggedWindow` is the
time between two meetings of all ranks; the lines after it are the messages served in it.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from collectives.files import read_regular
from mpitrain.files import begin, being_written
from mpitrain.ranks.together import SharedError


class LogError(SharedError):
    """A log cannot be written; the message names the file and why."""


class Line(Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag=str.lower):
    """A line of the log."""


class Begun(Line, frozen=True):
    """The beginning or resumption of a run, after ``step`` steps.

    ``workers`` are groups that push.
    """

    format: int
    server: int
    servers: int
    workers: int
    step: int


class LoggedWindow(Line, frozen=True, tag="window"):
    """The batches ``first <= i < stop`` between two meetings; ``events`` lines follow."""

    first: int
    stop: int
    events: int


class Pull(Line, frozen=True):
    """A worker's group was sent the parameters for the batch ``clock``.

    ``version``: pushes applied to them since the last meeting.
    """

    worker: int
    clock: int
    version: int


class Push(Line, frozen=True):
    """A group's gradient was applied; with ``bound = 0``, when the last one of its clock came.

    Attributes:
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
#: Errors of a line that is none of a log.
_NOT_A_LINE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def name(server: int) -> str:
    """File name of a server's log in the run's folder."""
    return f"server-{server}.jsonl"


class ServiceLog:
    """The log that a server writes, a window at a time."""

    def __init__(self, folder: Path, begun: Begun) -> None:
        """Write nothing yet; ``begun``: first line of the log, but for the step."""
        self._path, self._begun = folder / name(begun.server), begun
        self._file: FileIO | None = None

    def begin(self, step: int) -> None:
        """Keep an earlier run's log up to a step, and begin; further calls do nothing.

        Raises:
            LogError: it cannot be written, or another server's of the run before be deleted.
        """
        if self._file:
            return
        path = self._path
        with being_written(path, LogError):
            if self._begun.server == step == 0:
                _remove_others(path.parent, self._begun.servers)
            self._file = begin(path, _until(path, step) if step and path.exists() else ())
        self._write([replace(self._begun, step=step)])

    def add(self, first: int, stop: int, events: Sequence[Pull | Push]) -> None:
        """Write a window and the messages served in it; ``LogError``: they cannot be written."""
        self._write([LoggedWindow(first, stop, len(events)), *events])

    def _write(self, written: Sequence[Event]) -> None:
        assert self._file, "begin() comes first"
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in written)
        with being_written(self._path, LogError):
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        if self._file:
            self._file.close()


def _remove_others(folder: Path, servers: int) -> None:
    """Delete logs of an earlier run with more servers."""
    for path in folder.glob("server-*.jsonl"):
        number = path.stem.removeprefix("server-")
        if number.isdecimal() and path.name == name(int(number)) and int(number) >= servers:
            path.unlink()


def _until(path: Path, step: int) -> Iterator[bytes]:
    """The lines of a file before the first window that goes beyond a step."""
    with suppress(*_NOT_A_LINE):
        for line in read_regular(path).splitlines(keepends=True):
            found = msgspec.json.decode(line, type=Event)
            if (isinstance(found, LoggedWindow) and found.stop > step) or not line.endswith(b"\n"):
                return
            yield line
