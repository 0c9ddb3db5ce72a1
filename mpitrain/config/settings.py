"""A job with some of its keys set from a program."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from mpitrain.config.job import Config
from mpitrain.config.reading import converted, expect_read


def configured(config: Config, settings: Mapping[str, Any]) -> Config:
    """The job with some settings: keys that one table alone has, or tables.

    Raises:
        TypeError: for a keyword that is none of them.
        ConfigError: for a value that cannot be.
    """
    if not isinstance(config, Config):
        raise TypeError(
            f"config is a {type(config).__name__}, and a Config is needed; give tables of a job as "
            "keywords, as in data={...}"
        )
    tables = msgspec.to_builtins(config)
    fields = {t.name: msgspec.structs.fields(t.type) for t in msgspec.structs.fields(Config)}
    places: dict[str, list[str]] = {}
    for table, keys in fields.items():
        for key in keys:
            places.setdefault(key.name, []).append(table)
    for name, value in settings.items():
        value = str(value) if isinstance(value, Path) else value
        if name in tables:
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} is a table; write {name}={{...}}, not {value!r}")
            tables[name] |= value
        elif len(found := places.get(name, [])) == 1:
            tables[found[0]][name] = value
        elif found:
            known = " or ".join(f"{table}={{{name!r}: ...}}" for table in found)
            raise TypeError(f"{name} is a key of several tables; write {known}")
        else:
            near = get_close_matches(name, [*tables, *places], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{name} is no setting of a job{hint}")
    job = converted(tables)
    expect_read(job)
    return job
