"""Options in a text, ``name:option=value,option=value``, as codecs have them."""

import re
from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")


def with_options(
    text: str, kind: type[Kind], known: Collection[str], usual: Mapping[str, Any]
) -> Kind:
    """An object of a kind with the options that a text names.

    Args:
        text: a name, then a colon and the options, if there are any.
        kind: a class whose fields have types.
        known: options that the text may name.
        usual: values of options that the text may leave out.

    Raises:
        ValueError: an option is unknown, is there twice or has a value that cannot be.
    """
    name, _, rest = text.partition(":")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key in known and not value:
            raise ValueError(f"{text!r}: {key} has no value; write it behind {key}=")
        if key not in known:
            options = ", ".join(known) or "no options"
            raise ValueError(f"{text!r}: {part!r} is no option of {name}, which has {options}")
        if key in given:
            raise ValueError(f"{text!r}: {key} is there twice; leave one out")
        given[key] = _number(value)
    try:
        found = msgspec.convert({**usual, **given}, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        # msgspec names the place behind the reason, as one of a job.
        reason, _, option = str(error).partition(" - at `$.")
        said = f"{option.strip('`')}: {reason}" if option else reason
        raise ValueError(f"{text!r}: {said}") from error
    for key in given:
        if isinstance(value := getattr(found, key), float) and not isfinite(value):
            raise ValueError(f"{text!r}: {key} must be a finite number")
    return found


def _number(text: str) -> str:
    """A number as JSON has it, which knows neither ``+1`` nor ``.1`` nor ``1.``."""
    if whole := re.fullmatch(r"\+?(\d+)", text, re.ASCII):
        return whole[1]
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.ASCII | re.I):
        return text
    return repr(float(text))
