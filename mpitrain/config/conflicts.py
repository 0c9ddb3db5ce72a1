"""Combinations of methods, and the sentences that refuse those that fail."""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import msgspec

from mpitrain.config.method_table import BASE, METHODS, Method
from mpitrain.config.numbers import toml
from mpitrain.config.tables import ConfigError, Tables

_DEFAULTS = Tables()
#: Methods that keys of a job choose.
CHOSEN = tuple(method for method in METHODS if method.sets)


def uses(job: Tables, method: Method) -> bool:
    """Whether a job uses a method."""
    if method.used:
        return method.used(job)
    key = next(iter(method.sets), "")
    return bool(key) and attrgetter(key)(job) != attrgetter(key)(_DEFAULTS)


def refusals(job: Tables, *given: str, command: str = "") -> Iterator[tuple[str, str]]:
    """Why the methods of a job do not go together, as (key, sentence).

    Args:
        job: the tables.
        given: further methods that are used, by name, whatever the job says.
        command: the command that runs the job, for methods that are "this command".
    """
    found = [m for m in METHODS if m.name in given or uses(job, m)]
    for needing in found:
        for need in needing.needs:
            for other in found:
                if other is not needing and need in other.lacks:
                    ways = f"{_without(other)}, or {_without(needing)}"
                    if ways.startswith("set "):
                        ways = ways.replace(", or set ", " or ")
                    sentence = (
                        f"{needing.title} needs {need}, and {other.title} {other.lacks[need]}; "
                        f"{ways}"
                    )
                    key = next(iter(needing.sets or other.sets), needing.name)
                    yield key, sentence.replace("this command", command or "this command")


def expect(job: Tables, *given: str, command: str = "") -> None:
    """The methods of a job go together, and with further ones; arguments as for ``refusals``.

    Raises:
        ConfigError: two of them do not.
    """
    for key, why in refusals(job, *given, command=command):
        raise ConfigError(f"{key}: {why}")


def needs_host(job: Tables) -> str:
    """Why a job computes on the CPU alone, as "key: sentence"; empty if a GPU can do it."""
    return next((f"{key}: {why}" for key, why in refusals(job, "cuda")), "")


def _without(method: Method) -> str:
    """The way to do without a method."""
    if method.instead:
        return method.instead
    key = next(iter(method.sets))
    if key in ("model.kind", "compress.codec"):
        return f"take another {key}"
    default = toml(attrgetter(key)(_DEFAULTS)).replace('"', "'")
    return f"set {key} = {default}"


def combined(methods: Iterable[Method]) -> dict[str, Any]:
    """The keys of a job that uses some methods.

    Raises:
        ValueError: two of them set one key to different values.
    """
    found: dict[str, Any] = {}
    for method in methods:
        for key, value in method.sets.items():
            if found.setdefault(key, value) != value:
                raise ValueError(f"{key} is one of {toml(found[key])} and {toml(value)}")
    beside = {key: value for method in methods for key, value in method.beside.items()}
    return BASE | beside | found


def tables_of(keys: dict[str, Any]) -> Tables:
    """The tables of a job in which these keys are set, whether they fit together or not."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        table, _, name = key.partition(".")
        nested.setdefault(table, {})[name] = value
    return msgspec.convert(nested, Tables)
