"""The tables of a job file and their keys, as the docstrings of their classes describe them."""

import re
from collections.abc import Iterator
from inspect import cleandoc
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import Struct, inspect

from mpitrain.config.numbers import number, toml
from mpitrain.config.tables import Group, Tables

#: Least upper limit that only keeps a number within its type's range.
_NO_LIMIT = 2**31 - 1


class Key(NamedTuple):
    """A key of a table.

    Attributes:
        name: name of the key in the job file.
        values: values that it may have, in words and choices.
        default: default value in TOML; empty if it has none.
        text: its description, with code in backquotes.
    """

    name: str
    values: str
    default: str
    text: str


class Table(NamedTuple):
    """A table of a job file.

    Attributes:
        name: text of its header, without the brackets.
        is_list: whether a job file may repeat it, each time under a header in double brackets.
        text: paragraphs that describe all of its keys together.
        keys: keys of the table, in the order of its class.
    """

    name: str
    is_list: bool
    text: list[str]
    keys: list[Key]

    @property
    def header(self) -> str:
        """The header as the job file has it."""
        return f"[[{self.name}]]" if self.is_list else f"[{self.name}]"


def tables() -> list[Table]:
    """All tables of a job file."""
    found = []
    for field in msgspec.structs.fields(Tables):
        found.append(_table(field.name, field.type))
        if field.name == "optim":
            found.append(_table("optim.groups", Group, is_list=True))
    return found


def _table(name: str, kind: type[Struct], *, is_list: bool = False) -> Table:
    head, _, listed = cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
    paragraphs = [" ".join(part.split()) for part in head.removeprefix(f"[{name}]").split("\n\n")]
    texts = dict(_attributes(listed))
    keys = [
        Key(field.name, _values(field.type), _default(field), texts[field.name])
        for field in msgspec.structs.fields(kind)
    ]
    return Table(name, is_list, [_code(text) for text in paragraphs if text], keys)


def _attributes(listed: str) -> Iterator[tuple[str, str]]:
    """Each key with its text; several that are described together all have it."""
    for part in re.split(r"^    (?=\S)", listed, flags=re.MULTILINE)[1:]:
        names, _, text = part.partition(":")
        for name in names.split(","):
            yield name.strip(), _code(" ".join(text.split()))


def _code(text: str) -> str:
    return text.replace("``", "`")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is dict:
        return "{}"
    value = field.default
    return "" if value is msgspec.NODEFAULT or value is None else toml(value)


def _values(kind: Any) -> str:
    *others, last = _alternatives(kind)
    return f"{', '.join(others)} or {last}" if others else last


def _alternatives(kind: Any) -> list[str]:
    """Words for the values of a type, in the order of the type."""
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]):  # a note on a choice
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return [toml(value) for value in get_args(kind)]
    if get_origin(kind) in (Union, UnionType):
        return [words for one in get_args(kind) for words in _alternatives(one)]
    found = inspect.type_info(kind)
    match found:
        case inspect.BoolType():
            return ["true", "false"]
        case inspect.IntType():
            return [f"whole number{_range(found)}"]
        case inspect.FloatType():
            return [f"number{_range(found)}"]
        case inspect.StrType():
            return ["text"]
        case inspect.VarTupleType():
            return [f"list of {_plural(get_args(kind)[0])}"]
        case inspect.DictType():
            return [f"table of {_plural(get_args(kind)[1])}"]
        case inspect.StructType():
            return ["table"]
        case inspect.NoneType():
            return []
    raise TypeError(f"no words for {kind}")


def _plural(kind: Any) -> str:
    """``whole numbers from 1 on``, or the choices."""
    words, *more = _alternatives(kind)
    if more:
        return f"{', '.join([words, *more[:-1]])} and {more[-1]}"
    return re.sub(r"^(whole )?\w+", r"\g<0>s", words)


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    """`` from 0 to 3``, `` above 0, below 1``, or nothing."""
    limits = (("above", kind.gt), ("from", kind.ge), ("below", kind.lt), ("to", kind.le))
    found = [
        f"{word} {number(limit)}"
        for word, limit in limits
        if limit is not None and not (word == "to" and limit >= _NO_LIMIT)
    ]
    if len(found) == 1 and found[0].startswith("from"):
        found[0] += " on"
    between = " " if kind.ge is not None and kind.le is not None else ", "
    return f" {between.join(found)}" if found else ""
