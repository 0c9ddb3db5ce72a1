"""Codes by name, as the job file has them: ``"topk:keep=0.01"``."""

from dataclasses import fields
from typing import Any

import msgspec

from collectives.coded import Codec
from mpitrain.compress.casts import BF16, FP16
from mpitrain.compress.codec import Linear, Sparse

Compressor = Codec | Linear | Sparse
#: Classes whose fields are the options; their docstrings say what they are.
CODECS: dict[str, type[Any]] = {"bf16": BF16, "fp16": FP16}


class CodecError(ValueError):
    """There is no such code, or an option cannot be."""


def parse(text: str) -> Compressor:
    """The code of ``name:option=value,option=value``.

    Raises:
        CodecError: no code has this name, option or value; the message says what there is.
    """
    name, _, rest = text.partition(":")
    if name not in CODECS:
        raise CodecError(f"there is no code {name!r}; there are {', '.join(CODECS)}")
    kind = CODECS[name]
    known = [field.name for field in fields(kind)]
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in known or not value:
            options = ", ".join(known) or "no options"
            raise CodecError(f"{text!r}: {part!r} is no option of {name}, which has {options}")
        given[key] = value
    try:
        found: Compressor = msgspec.convert(given, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise CodecError(f"{text!r}: {error}") from error
    return found
