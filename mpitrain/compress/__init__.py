"""Codecs for gradients, of three kinds, which decide the collective."""

from collectives.codec import Codec, FeedbackMemory
from mpitrain.compress.codec import (
    Feedback,
    LinearCodec,
    Momentum,
    Remembering,
    Sketch,
    Sparse,
    feedback_of,
)
from mpitrain.compress.table import (
    CODECS,
    AnyCodec,
    CodecDescription,
    CodecError,
    describe,
    kind_of,
    parse,
)

__all__ = [
    "CODECS",
    "Codec",
    "CodecError",
    "AnyCodec",
    "CodecDescription",
    "Feedback",
    "LinearCodec",
    "FeedbackMemory",
    "Momentum",
    "Remembering",
    "Sketch",
    "Sparse",
    "describe",
    "feedback_of",
    "kind_of",
    "parse",
]
