"""A layout in the place of a job's own, as a user writes it."""

import re
from typing import Any

import msgspec

from mpitrain.config import ConfigError, Parallel
from mpitrain.config.numbers import toml
from mpitrain.config.reading import apply
from mpitrain.config.unread import readers

#: Keys of [parallel] that another layout does not take over from the job.
_LAYOUT = (
    "pipe", "tensor", "experts", "data", "replicas", "partition", "schedule", "chunks", "context",
    "space", "sequence", "zero", "recompute",
)  # fmt: skip


def beside(words: str, option: str) -> list[str]:
    """Overrides of a job file for a layout such as ``data=2,pipe=2``.

    Keys that make a layout and that it lacks have their defaults, and so have those that it does
    not read; the others are the job's.
    A key is one of [parallel], or ``micro_batches``; ConfigError: it is another one, which the
    error calls an ``option``'s.
    """
    usual = msgspec.to_builtins(Parallel())
    found = [f"parallel.{key}={toml(usual[key])}" for key in _LAYOUT]
    for word in re.split(r"[,\s]+(?=[a-z_.]+\s*=)", words.strip()):
        key = word.partition("=")[0].strip().removeprefix("parallel.")
        if "=" not in word or "." in key:
            raise ConfigError(
                f"{option} takes keys of [parallel], or micro_batches, as in 'data=2,pipe=2', not "
                f"{word!r}; the model, data and batch are the job's"
            )
        place = "train." if key == "micro_batches" else "parallel."
        found.append(f"{place}{word.removeprefix('parallel.')}")
    tables = dict[str, dict[str, Any]]()
    for override in found:
        apply(tables, override)
    own = tables["parallel"]
    for of, key, by in readers():  # what the job sets for its own layout alone
        if of == "parallel" and key not in own and not by.reads(own[by.key], usual[by.key]):
            found.append(f"parallel.{key}={toml(usual[key])}")
    return found
