"""A job from a file and the command line, or with keys that a program sets."""

import difflib
import os
import re
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from collectives import ScheduleError, UnknownAlgorithm, algorithms
from mpitrain.config import examples
from mpitrain.config.refused_keys import check_names
from mpitrain.config.tables import ConfigError, SettingError
from mpitrain.config.unread import Brought, unread
from mpitrain.config.validation import Config

Kind = TypeVar("Kind")

#: Words for msgspec's names of types.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}

#: Bytes of a job file; more is something else, as a device that never ends.
_LARGEST = 1 << 20


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a job from a TOML file.

    Args:
        path: the file, or the name of an example (:mod:`mpitrain.config.examples`).
        overrides: ``table.key=value`` each, applied in turn on top of the file.  Values are
            written as in TOML; what is not TOML is a string, so that ``=ring`` needs no quotes.

    Raises:
        ConfigError: the file cannot be read, or it asks for something that cannot be; the message
            is one sentence with the place as a dotted path.
    """
    try:
        path = examples.find(path)
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        if path.suffix == ".py":
            raise ValueError("it is a program: start it with mpirun, or name its parts in [own]")
        tables = tomllib.loads(text.decode("utf-8-sig"))
    except RecursionError as error:
        raise ConfigError(f"cannot read the job file {path}: it is nested too deeply") from error
    except (OSError, ValueError) as error:  # not UTF-8, not TOML, or a number of 5000 digits
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the job file {path}: {reason}") from error
    for override in overrides:
        apply(tables, override)
    _switch_off(tables, tables)
    run = tables.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("dir", f"runs/{path.stem}")
    place = "algorithm"
    try:
        job = converted(tables, Config)
        expect_read(job)
        _check_algorithm(job.parallel.algorithm, job.parallel.zero)
        place = "alltoall"
        _check_alltoall(job.parallel.alltoall)
        return _with_data_beside(path, job)
    except (UnknownAlgorithm, ScheduleError) as error:
        raise ConfigError(f"parallel.{place}: {error}") from error


def converted(tables: dict[str, Any], kind: type[Kind]) -> Kind:
    """The job of tables by name, or one of its tables.

    Raises:
        ConfigError: it cannot be; the message begins with the place as a dotted path.
    """
    check_names(tables, kind, ())
    try:
        return msgspec.convert(tables, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, place = str(error).partition(" - at `$")
        where = place.strip("`").lstrip(".")
        reason = re.sub(r"^Expected `(.+?)`", _expected, reason)
        if not where:
            raise ConfigError(reason) from error
        given = _given(tables, where)
        if isinstance(given, str | int | float | list | dict | None):
            reason = f"{reason.partition(', got ')[0]}, got {reprlib.repr(given)}"
        if isinstance(given, dict) and "a list" in reason:
            reason += f"; each table of a list has a header of its own, [[{where}]]"
        raise ConfigError(f"{where}: {reason}") from error


def _expected(found: re.Match[str]) -> str:
    """msgspec's ``Expected `int | null` `` in words."""
    words = [_WORDS[name] for name in found[1].split(" | ") if name in _WORDS]
    return f"expected {' or '.join(words)}" if words else found[0]


def _given(tables: Any, place: str) -> Any:
    """The value at a place as msgspec writes it, ``optim.groups[0].lr`` or ``compress[...]``."""
    value = tables
    for key in re.findall(r"[^.[\]]+", place):
        value = value[int(key) if isinstance(value, list | tuple) else key]
    return value


def configured(config: Config, settings: Mapping[str, Any]) -> Config:
    """The job with some settings: keys that one table alone has, or tables.

    Whether something reads them is for :func:`expect_read`, with what a program brings.

    Raises:
        SettingError: for a keyword that is none of them.
        ConfigError: for a value that cannot be.
    """
    expect_job(config)
    tables = msgspec.to_builtins(config)
    fields = {t.name: msgspec.structs.fields(t.type) for t in msgspec.structs.fields(Config)}
    places: dict[str, list[str]] = {}
    asked: dict[str, dict[str, Any]] = {}
    for table, keys in fields.items():
        for key in keys:
            places.setdefault(key.name, []).append(table)
    for name, value in settings.items():
        value = _plain(value)
        if name in tables:
            if not isinstance(value, Mapping):
                raise SettingError(f"{name} is a table; write {name}={{...}}, not {value!r}")
            asked.setdefault(name, {}).update(value)
        elif len(found := places.get(name, [])) == 1:
            asked.setdefault(found[0], {})[name] = value
        elif found:
            known = " or ".join(f"{table}={{{name!r}: ...}}" for table in found)
            raise SettingError(f"{name} is a key of several tables; write {known}")
        else:
            near = difflib.get_close_matches(name, [*tables, *places], n=1, cutoff=0.5)
            nearest = f"; did you mean {near[0]}?" if near else ""
            raise SettingError(f"{name} is no setting of a job{nearest}")
    for name, own in asked.items():
        tables[name] |= own
    _switch_off(tables, asked)
    return converted(tables, Config)


def _switch_off(tables: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """Drop the keys of clients where ``asked`` says that there are none, and those of servers."""
    for name, switch, kept in (
        ("federated", "clients", ()),
        ("server", "ranks", ("hogwild", "window")),
    ):
        own, usual = asked.get(name), getattr(Config(), name)
        if isinstance(own, Mapping) and own.get(switch) == 0:
            unread = {*usual.__struct_fields__} - {switch, *kept}
            tables[name] = {key: v for key, v in tables[name].items() if key not in unread}


def expect_job(config: object) -> None:
    """Raise SettingError for anything but a :class:`Config`."""
    if not isinstance(config, Config):
        raise SettingError(
            f"config is a {type(config).__name__}, and a Config is needed, as of "
            "mpitrain.config.load(path); give tables of a job as keywords, as in data={...}"
        )


def _plain(value: Any) -> Any:
    """A setting as a job file has it: no paths, no numbers and types of NumPy or torch."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and not hasattr(value, "tolist"):  # a type or a device
        return str(value).removeprefix("torch.")
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    return value.tolist() if hasattr(value, "tolist") else value


def _with_data_beside(path: Path, job: Config) -> Config:
    """The job, with ``data.path`` and one's own files beside the job file where they are only
    there."""

    def found(named: str) -> str:
        beside = os.path.join(path.parent, named)
        here = not named or os.path.exists(named) or not os.path.exists(beside)
        return named if here else beside

    own: Any = {}
    for key, value in msgspec.structs.asdict(job.own).items():
        if isinstance(value, str) and re.search(r"\.(py|npz):", value):
            file, _, name = value.rpartition(":")
            own[key] = f"{found(file)}:{name}"
    data = replace(job.data, path=found(job.data.path))
    return replace(job, data=data, own=replace(job.own, **own))


def apply(tables: dict[str, Any], override: str) -> None:
    """Set a key of tables as ``table.key=value`` says; ConfigError: it says something else."""
    place, equals, text = override.partition("=")
    *parents, key = place.strip().split(".")
    if not equals or not key or not parents:
        raise ConfigError(f"--set takes table.key=value, as in optim.lr=0.1, not {override!r}")
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{place}: {parent} is a value in the job file, not a table")
    text = text.strip()  # an end of a line of Windows, too, which TOML does not take
    try:
        table[key] = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        table[key] = text
    except RecursionError as error:
        raise ConfigError(f"{place.strip()}: the value is nested too deeply") from error


def expect_read(job: Config, brought: Brought | None = None) -> None:
    """Check that a run reads all keys that the job sets, with the parts that a program brings.

    Its folder may not begin with ``~``, which nothing expands.

    Raises:
        ConfigError: not of a key; the message is one sentence with the place as a dotted path.
    """
    if job.run.dir.startswith("~"):
        raise ConfigError(
            f"run.dir: {job.run.dir!r} would make a folder called ~; only a shell expands it, and "
            "not behind =; write the home folder out"
        )
    for place, why in unread(job, brought or Brought()):
        raise ConfigError(f"{place}: {why}")


def _expect_name(algorithm: str) -> None:
    """Check that an algorithm is not named by a file."""
    if ".py" in algorithm:
        raise UnknownAlgorithm(
            f"{algorithm!r} is a file, and a checkpoint's job must be readable without it; call "
            "collectives.register in the program that makes the Trainer and give the name here, or "
            "name it in a package's entry point group collectives.algorithms"
        )


def _check_alltoall(algorithm: str) -> None:
    """Check the algorithm that sends rows, as many as a router has chosen."""
    _expect_name(algorithm)
    algorithms.check("alltoall", algorithms.resolve(algorithm))
    name, _ = algorithms.parse(algorithm)
    if name not in ("auto", "native") and not algorithms.find("alltoall", name).uneven:
        raise UnknownAlgorithm(f"{name} needs blocks of equal length; take 'pairwise', for example")


def _check_algorithm(algorithm: str, zero: int) -> None:
    """Check the algorithm of a job that is to run; a checkpoint is read without it."""
    _expect_name(algorithm)
    name = algorithms.resolve(algorithm)
    if zero != 1:
        return algorithms.check("allreduce", name)
    try:
        algorithms.check("reduce_scatter", name)
    except UnknownAlgorithm as error:
        raise UnknownAlgorithm(
            f"{error}; parallel.zero = 1 sums gradients by a reduce-scatter: take one that it has, "
            "or 'auto', or set zero = 0"
        ) from error
