"""Gradients in fewer bytes: codes of three kinds, by what of them adds up over ranks."""

from mpitrain.compress.codec import (
    Codec,
    Feedback,
    Linear,
    Memory,
    Momentum,
    Remembering,
    Sketch,
    Sparse,
    feedback_of,
)
from mpitrain.compress.table import (
    CODECS,
    CodecError,
    Compressor,
    Description,
    describe,
    kind_of,
    parse,
)

__all__ = [
    "CODECS",
    "Codec",
    "CodecError",
    "Compressor",
    "Description",
    "Feedback",
    "Linear",
    "Memory",
    "Momentum",
    "Remembering",
    "Sketch",
    "Sparse",
    "describe",
    "feedback_of",
    "kind_of",
    "parse",
]
