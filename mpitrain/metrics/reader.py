"""The one reader of ``metrics.jsonl``: the writer's types again, tolerant of other versions."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from mpitrain.files import check_regular
from mpitrain.metrics.records import Record, Start, Step, Summary

#: How every line begins: what follows the last line break and begins so was cut off.
_BEGINNING = b'{"event":"'
_KINDS = {kind.__struct_config__.tag: kind for kind in get_args(Record)}
_FLOATS = {
    event: [field.name for field in msgspec.structs.fields(kind) if field.type is float]
    for event, kind in _KINDS.items()
}
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Unknown:
    """A record of a version of mpitrain that writes more kinds than this one.

    Attributes:
        event: its kind.
        step: the step it names, 0 if it names none.
    """

    event: str
    step: int


@dataclass(frozen=True)
class Log:
    """What a run wrote, in its order.

    Attributes:
        path: the file.
        records: those that this version knows.
        unknown: the kinds of the others.
        cut_off: whether the last line ends in the middle: the run was killed while it wrote it, or
            is writing it now.
    """

    path: Path
    records: list[Record]
    unknown: list[str]
    cut_off: bool

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """All records of a kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def last(self, kind: type[_Kind]) -> _Kind | None:
        """The last record of a kind, if there is one."""
        found = self.of(kind)
        return found[-1] if found else None

    def start(self) -> Start:
        """The last start; a run that was resumed has several.

        Raises:
            ValueError: there is none.
        """
        found = self.last(Start)
        if found is None:
            raise ValueError(f"{self.path} has no start of a run")
        return found

    def summary(self) -> Summary | None:
        """The summary, if the run has ended since its last start."""
        found = self.last(Summary)
        return found if found and found in self.since_start() else None

    def since_start(self) -> list[Record]:
        """The records after the last start; all of them if there is none."""
        starts = [n for n, record in enumerate(self.records) if isinstance(record, Start)]
        return self.records[starts[-1] + 1 :] if starts else self.records


def read_records(path: Path) -> Log:
    """The records of a run's ``metrics.jsonl``.

    A number that is not finite is written as null, and read as nan.  Records of unknown kinds are
    counted, fields that this version does not know are left out.

    Raises:
        ValueError: the file cannot be read, or is not what a run writes; the message names the
            first line that is no record.
    """
    records: list[Record] = []
    unknown: list[str] = []
    try:
        check_regular(path)
        data = path.read_bytes()
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
    """Each line of a file's bytes, and its record; None for a last line that was cut off.

    Raises:
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


def count_steps(path: Path) -> int:
    """The steps in a file, 0 if there is no file; quick enough to be asked again and again."""
    mark = msgspec.json.encode({"event": Step.__struct_config__.tag})[:-1] + b","
    return path.read_bytes().count(mark) if path.exists() else 0


def _is_cut_off(line: bytes) -> bool:
    """Whether a line is the beginning of a record, and not all of it."""
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
    """The record of a line; ValueError says why it is none."""
    try:
        told = msgspec.json.decode(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(told, dict) or not isinstance(told.get("event"), str):
        raise ValueError("it names no event")
    event = told["event"]
    if "test_accuracy" in told:  # before 0.2, the one metric
        told["metrics"] = {"accuracy": told.pop("test_accuracy")}
    if event not in _KINDS:
        step = told.get("step")
        return Unknown(event, step if isinstance(step, int) else 0)
    try:
        found: Record = msgspec.convert(
            _with_nan(told, _FLOATS[event]), _KINDS[event], str_keys=True
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"a {event} with a wrong field: {error}") from error
    return found


def _with_nan(told: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    numbers = {**told, **{name: math.nan for name in names if told.get(name, 0) is None}}
    if isinstance(metrics := told.get("metrics"), dict):
        numbers["metrics"] = {k: math.nan if v is None else v for k, v in metrics.items()}
    return numbers
