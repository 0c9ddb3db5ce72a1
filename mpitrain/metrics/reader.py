"""The reader of ``metrics.jsonl``; it skips kinds and fields of newer versions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

import msgspec

from collectives.files import read_regular
from mpitrain.metrics.records import Record, Start, Summary

#: Beginning of every line: a last line that begins so without a line break was cut off.
_BEGINNING = b'{"event":"'
_KINDS = {kind.__struct_config__.tag: kind for kind in get_args(Record)}
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Unknown:
    """Record of a newer version, by its kind and its step, 0 without one."""

    event: str
    step: int


@dataclass(frozen=True)
class Log:
    """Records of a run in the order of writing.

    Attributes:
        path: the file.
        records: records of known kinds.
        unknown: kinds of the other records.
        cut_off: whether the last line is incomplete: the run was killed in it, or is writing it.
    """

    path: Path
    records: list[Record]
    unknown: list[str]
    cut_off: bool

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Records of a kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def last(self, kind: type[_Kind]) -> _Kind | None:
        """Last record of a kind, or None."""
        found = self.of(kind)
        return found[-1] if found else None

    def start(self) -> Start:
        """Last start, as a resumed run has several; ``ValueError`` without one."""
        found = self.last(Start)
        if found is None:
            raise ValueError(f"{self.path} has no start of a run")
        return found

    def summary(self) -> Summary | None:
        """Summary, if the run has ended since its last start."""
        return self.since_start().last(Summary)

    def since_start(self) -> "Log":
        """The log of what came after the last start; without one, of all."""
        starts = [n for n, record in enumerate(self.records) if isinstance(record, Start)]
        return replace(self, records=self.records[starts[-1] + 1 :] if starts else self.records)


def read_records(path: Path) -> Log:
    """The records of a run's ``metrics.jsonl``; what is not finite is null there, and read as nan.

    ValueError: the file cannot be read, or has a line that is no record; the message names it.
    """
    records: list[Record] = []
    unknown: list[str] = []
    try:
        data = read_regular(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    for _, record in lines(path, data):
        if record is None:
            return Log(path, records, unknown, cut_off=True)
        if isinstance(record, Unknown):
            unknown.append(record.event)
        else:
            records.append(record)
    return Log(path, records, unknown, cut_off=False)


def lines(path: Path, data: bytes) -> Iterator[tuple[bytes, Record | Unknown | None]]:
    """Lines of a file's bytes with their records; None for a last line that was cut off.

    ValueError: a line is no record; the message names ``path`` and the line.
    """
    found = data.splitlines(keepends=True)
    for number, line in enumerate(found, 1):
        record: Record | Unknown | None = None
        try:
            record = _record(line)
        except ValueError as error:
            if number < len(found) or not _is_cut_off(line):
                raise ValueError(
                    f"{path}, line {number}, is no record of a run of mpitrain: {error}"
                ) from error
        yield line, record


def _is_cut_off(line: bytes) -> bool:
    """Whether a line is an incomplete record."""
    if line.endswith(b"\n") or not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
        return False
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return True
    except RecursionError:  # no record is nested so deeply
        return False
    return False


def _record(line: bytes) -> Record | Unknown:
    """Record of a line; ``ValueError`` says why it is none."""
    try:
        told = msgspec.json.decode(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(told, dict) or not isinstance(told.get("event"), str):
        raise ValueError("it names no event")
    event = told["event"]
    if event not in _KINDS:
        step = told.get("step")
        return Unknown(event, step if isinstance(step, int) else 0)
    try:
        kind = _KINDS[event]
        numbers = _with_nan(told, kind) if b"null" in line else told
        found: Record = msgspec.convert(numbers, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"a {event} with a wrong field: {error}") from error
    return found


def _with_nan(told: Any, kind: Any) -> Any:
    """Value of type ``kind`` as JSON has it, with nan for each null where it has a float."""
    if told is None and kind is float:
        return math.nan
    parts = get_args(kind)
    if isinstance(kind, UnionType):  # of a struct and its absence
        return _with_nan(told, parts[0])
    if isinstance(told, list) and parts:
        return [_with_nan(one, parts[0]) for one in told]
    if isinstance(told, dict) and parts:
        return {key: _with_nan(one, parts[-1]) for key, one in told.items()}
    if isinstance(told, dict) and hasattr(kind, "__struct_fields__"):
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        return {key: _with_nan(one, types.get(key)) for key, one in told.items()}
    return told
