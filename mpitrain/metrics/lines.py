"""Records as lines of JSON in a file, which is the source of truth."""

import errno
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, get_args

import msgspec

from mpitrain.metrics.records import Record, Write

#: The fields of each event, and which of them are numbers.
_FIELDS = {kind.__struct_config__.tag: msgspec.structs.fields(kind) for kind in get_args(Record)}


class ReportError(RuntimeError):
    """A report cannot be written; the message names the file and why."""


@contextmanager
def json_lines(path: Path, done: int = 0) -> Iterator[Write]:
    """A file at ``path`` with a line a record, complete up to the last record at any time.

    What is there already is replaced, but for the records up to step ``done``.

    Raises:
        ReportError: it cannot be written, now or when a record comes.
    """
    with ExitStack() as stack:
        with _reporting(path):
            file = stack.enter_context(_fresh(path, done))

        def write(record: Record) -> None:
            line = msgspec.json.encode(record) + b"\n"
            with _reporting(path):
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        yield write


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written: {error.strerror}; make room or choose another run.dir, and "
            "train --resume goes on from the newest checkpoint"
        ) from error


def _fresh(path: Path, done: int) -> FileIO:
    # What is new is the user's own; one that is there already keeps its permissions.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = list(_until(path, done)) if done and path.exists() else []
    beside = path.with_suffix(".unfinished")
    beside.write_bytes(b"".join(kept))
    beside.rename(path)
    # Nothing is kept back that could not be written later.
    return FileIO(path, "a")


def read_records(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The records of a file of :func:`json_lines`, and whether the last line was cut off.

    A number that is not finite is written as null, and read as nan.

    Raises:
        ValueError: the file cannot be read, or a line that is not the last is no record.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(line))
        except ValueError as error:
            if number == len(lines):
                return records, True
            raise ValueError(f"{path}, line {number}, is no record: {error}") from error
    return records, False


def _record(line: bytes) -> dict[str, Any]:
    """One line, understood; fields that this version does not know are kept."""
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise ValueError("it names no event")
    for field in _FIELDS.get(record["event"], ()):
        if field.required and field.name not in record:
            raise ValueError(f"a {record['event']} without {field.name}")
        if field.type in (int, float) and field.name in record:
            value = math.nan if record[field.name] is None else record[field.name]
            if not isinstance(value, int | float):
                raise ValueError(f"{field.name} is {value!r}, not a number")
            record[field.name] = value
    return record


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
