"""Keys that are set and that nothing reads: whoever sets them expects something else.

A job that is to run is asked for them, and not every :class:`~mpitrain.config.Config`: a checkpoint
can be read whatever its job says, and a job that the program derives from another one, as those of
clients, keeps keys that it does not read.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from mpitrain import extras
from mpitrain.config.numbers import ReadBy
from mpitrain.config.tables import Tables
from mpitrain.config.validation import Config

#: The parts of [own] that take the place of a key.
_IN_THE_PLACE_OF = {
    "optim.name": "own.optimizer",
    "optim.schedule": "own.schedule",
    "loss.name": "own.loss",
    "model.kind": "own.model",
    "data.name": "own.data",
}


class Brought(NamedTuple):
    """Parts of a job that a program brings itself.

    Attributes:
        kinds: the type of each part, as ``{"own.data": "Subset"}``.
        job: the job before the program's settings; the keys that it sets are not complained of.
    """

    kinds: Mapping[str, str] = MappingProxyType({})
    job: Config = Config()


def readers() -> Iterator[tuple[str, str, ReadBy]]:
    """The keys that not every job reads, as (table, key, reader)."""
    for table in msgspec.structs.fields(Tables):
        for field in msgspec.structs.fields(table.type):
            for note in getattr(field.type, "__metadata__", ()):
                if isinstance(note, ReadBy):
                    yield table.name, field.name, note


def defaults_of_readers(table: str, *keys: str) -> dict[str, Any]:
    """Defaults of the keys of a table that are read with some values of these keys alone."""
    usual = getattr(Config(), table)
    return {
        name: getattr(usual, name) for of, name, by in readers() if of == table and by.key in keys
    }


def as_read(job: Config, kinds: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Keys of a job by table; [own] names the parts of ``kinds`` that a program brings instead."""
    told: dict[str, dict[str, Any]] = msgspec.to_builtins(job)
    for place, own in _IN_THE_PLACE_OF.items():
        if kind := attrgetter(own)(job) or kinds.get(own):
            (table, name), part = place.split("."), own.partition(".")[2]
            told["own"][part] = kind
            for key in (name, *(key for of, key, by in readers() if (of, by.key) == (table, name))):
                told[table].pop(key, None)
    return told


def unread(job: Config, brought: Brought) -> Iterator[tuple[str, str]]:
    """Keys that nothing reads but are set, and a model not for its data: (key, sentence)."""
    usual = Config()
    for table, name, reader in readers():
        key, by, values = f"{table}.{name}", f"{table}.{reader.key}", reader.values
        value = attrgetter(by)(job)
        own = _IN_THE_PLACE_OF.get(by, "")
        before = brought.job if own in brought.kinds else usual
        if own and (kind := brought.kinds.get(own) or attrgetter(own)(job)):
            what = own.partition(".")[2]
            who = f"the {what} that the program brings ({kind})"
        elif by not in brought.kinds and not reader.reads(value, attrgetter(by)(usual)):
            who = f"{by} = {value!r}"
        else:
            continue
        default = attrgetter(key)(usual)
        if attrgetter(key)(job) not in (default, attrgetter(key)(before)):
            do = f"{' and '.join(map(repr, values))} {'do' if len(values) > 1 else 'does'}"
            others = f", {do}" if values else ""
            way = "leave it out" if values else f"set {by}, or leave it out"
            hint = f", or set {name} = {default!r}" if values and default else ""
            yield key, f"{who} does not read it{others}; {way}{hint}"
    if "own.model" not in brought.kinds and not job.own.model:
        for kind, names in (("gpt", ("text", "tokens")), ("recommender", ("clicks",))):
            if (job.model.kind == kind) != (job.data.name in names):
                yield "model.kind", f"a {job.model.kind} cannot be trained on {job.data.name}"
    if job.optim.schedule == "step" and not job.optim.milestones:
        yield (
            "optim.milestones",
            "optim.schedule = 'step' multiplies the rate at these epochs, and there are none; "
            "give some, as [15, 25], or set schedule = 'constant'",
        )
    codec = job.compress.codec
    is_read = job.compress.sparse == usual.compress.sparse or codec == "none"
    if not is_read and "sparse" not in extras.features(job):
        yield (
            "compress.sparse",
            f"compress.codec = {codec!r} does not read it, 'topk' and 'dgc' do; leave it out",
        )
    watches = job.evaluate.patience or job.own.schedule  # which may follow tests
    if job.evaluate.watch != usual.evaluate.watch and not watches:
        yield (
            "evaluate.watch",
            "says by which value training ends early, and with patience = 0 it never does; set "
            "evaluate.patience, or leave watch out (of the best checkpoint, checkpoint.best says "
            "it)",
        )
