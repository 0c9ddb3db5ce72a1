"""Comparison of the ranks' jobs, before anything is made of them."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from operator import index
from typing import Any

import msgspec
from mpi4py import MPI

from mpitrain.config import Config, ConfigError, by_key

#: Keys that may differ between ranks, as they change no numbers.
_OWN = {"data.workers", "parallel.offload", "run.records"}
#: Keys of paths, which may differ between nodes; contents are compared where they are read.
_PATHS = {"data.path", "parallel.profile"}
#: Values in a message before "and others", and characters of each.
_SHOWN, _LENGTH = 3, 80


def expect_same_job(
    comm: MPI.Intracomm, config: Config, besides: Mapping[str, object] | None = None
) -> None:
    """Compares the ranks' jobs, but for paths, and values ``besides``; see :func:`expect_same`."""
    expect_same(comm, _compared(config) | dict(besides or {}))


def expect_same(comm: MPI.Intracomm, given: Mapping[str, object]) -> None:
    """Compares the ranks' values; collective, one message of 16 bytes.

    ``given``: numbers, texts, and lists and mappings of them, by name; other objects are compared
    by their type.

    Raises:
        ConfigError: on all ranks: the first key that differs, with the ranks and their values.
    """
    own = {key: repr(_plain(value)) for key, value in given.items()}
    digest = hashlib.blake2b(repr(sorted(own.items())).encode(), digest_size=16).digest()
    if len(set(comm.allgather(digest))) == 1:
        return
    every = comm.allgather(own)
    keys = dict.fromkeys(key for one in every for key in one)
    key = next(key for key in keys if len({one.get(key) for one in every}) > 1)
    ranks: dict[str, list[str]] = {}
    for rank, one in enumerate(every):
        ranks.setdefault(one.get(key, "not given"), []).append(str(rank))
    told = [
        f"{value[:_LENGTH]} on rank{'s' if len(those) > 1 else ''} {', '.join(those)}"
        for value, those in list(ranks.items())[:_SHOWN]
    ]
    more = " and others elsewhere" if len(ranks) > _SHOWN else ""
    raise ConfigError(
        f"the ranks have different jobs: {key} is {' and '.join(told)}{more}; give all of them "
        "the same"
    )


def name_of(what: object) -> str:
    """Name of an object, or of its type: the same on all ranks and in all runs."""
    names = (getattr(what, key, None) for key in ("name", "__name__"))
    return next((name for name in names if name and isinstance(name, str)), type(what).__name__)


def described(optimizer: object) -> dict[str, object]:
    """Options of an optimiser by name."""
    if optimizer is None:
        return {}
    own: Mapping[str, object] = getattr(optimizer, "options", {})
    if is_dataclass(optimizer):
        own = {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}
    kind = {"optimizer": name_of(optimizer)}
    return kind | {f"optimizer.{key}": value for key, value in own.items()}


def _compared(config: Config) -> dict[str, object]:
    """Values of a job that must be the same on all ranks, by key."""
    found: dict[str, object] = {}
    for place, value in by_key(msgspec.to_builtins(config)).items():
        if place in _PATHS:
            value = "a path" if value else ""
        elif place.startswith("own.") and isinstance(value, str):
            value = value.rpartition("/")[2]
        elif place == "run.dir" and value.startswith("/"):  # nodes may mount it elsewhere
            value = value.rstrip("/").rpartition("/")[2]
        if place not in _OWN:
            found[place] = value
    return found


def _plain(value: Any) -> object:
    """Python numbers, texts, lists and mappings, whose ``repr`` is the same on all ranks."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    with suppress(TypeError, RuntimeError):
        return index(value)  # exact, where a float has 53 bits
    try:
        number = float(value)  # also NumPy's numbers and tensors of one number
    except (TypeError, ValueError, RuntimeError):
        return type(value).__name__
    return int(number) if number.is_integer() else number
