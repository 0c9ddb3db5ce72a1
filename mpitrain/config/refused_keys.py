"""Keys and values of a job that are refused, as they do not exist.

Values that cannot be are in :mod:`.validation`, those that do not go together in :mod:`.conflicts`,
keys that nothing reads in :mod:`.unread`.
"""

from typing import Any, get_args

import msgspec
from msgspec import Struct

from collectives.errors import hint
from mpitrain.config.tables import ConfigError

_QUORUM = "servers have it: set server.ranks = 1, server.bound = 0 and server.quorum"
_BOUND = "set a smaller server.bound, or correct = 'predict'"
#: Keys and values that jobs had, and what to write instead.
_GONE = {
    "sync.kind = 'quorum'": _QUORUM,
    "sync.quorum": _QUORUM,
    "sync.behind": _QUORUM,
    "sync.mix": "an exchange of local takes effect at once; leave it out, or set kind = 'delayed'",
    "sync.fragments": "workers exchange the whole model at once; leave it out",
    "server.correct = 'rate'": _BOUND,
    "server.correct = 'delay'": _BOUND,
    "server.compensation": _BOUND,
    "compress.exchange": "codes go in two phases; leave it out",
}


def check_names(value: object, kind: Any, path: tuple[str, ...]) -> None:
    """Raise for an unknown key or choice, with the nearest known one; msgspec checks the rest."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        for key, item in value.items() if isinstance(value, dict) else ():
            if key not in fields:
                raise ConfigError(_unknown("key", ".".join((*path, key)), key, fields))
            check_names(item, fields[key], (*path, key))
        return
    known = msgspec.inspect.type_info(kind)
    if isinstance(known, msgspec.inspect.VarTupleType) and isinstance(value, list):
        for number, item in enumerate(value):
            check_names(item, get_args(kind)[0], (*path[:-1], f"{path[-1]}[{number}]"))
    kinds = known.types if isinstance(known, msgspec.inspect.UnionType) else (known,)
    literals = [one.values for one in kinds if isinstance(one, msgspec.inspect.LiteralType)]
    choices = [one for values in literals for one in values if isinstance(one, str)]
    numbers = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
    also = ["a number"] if any(isinstance(one, numbers) for one in kinds) else []
    is_open = any(isinstance(one, msgspec.inspect.StrType) for one in kinds)  # or a file
    if choices and isinstance(value, str) and value not in choices and not is_open:
        raise ConfigError(_unknown("value", f"{'.'.join(path)} = {value!r}", value, choices + also))


def _unknown(what: str, subject: str, word: str, known: Any) -> str:
    if way := _GONE.get(subject):
        return f"{subject} has gone; {way}"
    return f"{subject}: unknown {what}; {hint(word, known, 'expected one of')}"
