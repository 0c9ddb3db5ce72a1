"""Codecs for gradients, of three kinds, which decide the collective.

They are made by name and options, as in a job file: ``parse("topk:keep=0.01")``.
"""

from dataclasses import fields
from typing import Any

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
from mpitrain.options import with_options

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
    name = text.partition(":")[0]
    if name not in CODECS:
        raise CodecError(f"there is no codec {name!r}; there are {', '.join(CODECS)}")
    kind = CODECS[name]
    try:
        found: AnyCodec = with_options(text, kind, [field.name for field in fields(kind)], {})
        return found
    except ValueError as error:
        raise CodecError(str(error)) from error
