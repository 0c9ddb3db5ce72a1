"""Codecs for gradients, of three kinds, which decide the collective.

They are made by name and options, as in a job file: ``parse("topk:keep=0.01")``.
"""

import re
from dataclasses import fields
from typing import Any

import msgspec

from collectives.codec import Codec
from mpitrain.compress.atomo import Atomo
from mpitrain.compress.blocks import Blocks
from mpitrain.compress.casts import BF16, FP16
from mpitrain.compress.codec import LinearCodec, Sparse
from mpitrain.compress.dgc import DGC
from mpitrain.compress.integers import Int8
from mpitrain.compress.powersgd import PowerSGD
from mpitrain.compress.qsgd import QSGD, TernGrad
from mpitrain.compress.signs import OneBit, Sign, Signum
from mpitrain.compress.threshold import Threshold
from mpitrain.compress.topk import TopK

AnyCodec = Codec | LinearCodec | Sparse
#: Classes by name; their fields are the options.
CODECS: dict[str, type[Any]] = {
    kind.name: kind
    for kind in (
        BF16, FP16, Int8, Sign, OneBit, Signum, TernGrad, QSGD, Threshold, TopK, DGC, Blocks,
        PowerSGD, Atomo,
    )
}  # fmt: skip


class CodecError(ValueError):
    """A codec does not exist, or does not take an option."""


def parse(text: str) -> AnyCodec:
    """Makes the codec ``name:option=value,option=value``.

    Raises:
        CodecError: no codec has this name, option or value; the message lists the choices.
    """
    name, _, rest = text.partition(":")
    if name not in CODECS:
        raise CodecError(f"there is no codec {name!r}; there are {', '.join(CODECS)}")
    kind = CODECS[name]
    known = [field.name for field in fields(kind)]
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in known or not value:
            options = ", ".join(known) or "no options"
            raise CodecError(f"{text!r}: {part!r} is no option of {name}, which has {options}")
        if key in given:
            raise CodecError(f"{text!r}: {key} is there twice; leave one out")
        given[key] = _number(value)
    try:
        found: AnyCodec = msgspec.convert(given, kind, strict=False)
        return found
    except (msgspec.ValidationError, ValueError) as error:
        raise CodecError(f"{text!r}: {error}") from error


def _number(text: str) -> str:
    """Adds the missing digits of numbers such as ``.1`` and ``+1.``, which JSON does not have."""
    if not re.fullmatch(r"[+-]?(\d+\.|\.\d+|\+?\d+\.\d+)(e[+-]?\d+)?", text):
        return text
    return repr(float(text))
