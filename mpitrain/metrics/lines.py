"""Records as lines of JSON in a file, which is the source of truth."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from mpitrain.metrics.records import Record, Write


@contextmanager
def json_lines(path: Path, done: int = 0) -> Iterator[Write]:
    """A file at ``path`` with a line a record, complete up to the last record at any time.

    What is there already is replaced, but for the records up to step ``done``.
    """
    # What is new is the user's own; one that is there already keeps its permissions.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = list(_until(path, done)) if done and path.exists() else []
    beside = path.with_suffix(".unfinished")
    beside.write_bytes(b"".join(kept))
    beside.rename(path)
    with path.open("ab") as file:

        def write(record: Record) -> None:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()

        yield write


def _until(path: Path, done: int) -> Iterator[bytes]:
    """The lines of a file before the first of a later step, or one that was cut off."""
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            step = msgspec.json.decode(line).get("step", 0)
        except (msgspec.DecodeError, AttributeError):
            return
        if step > done:
            return
        yield line
