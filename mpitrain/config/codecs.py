"""Codecs of jobs: what the table of methods asks about them, and keys that do not fit them."""

from collections.abc import Iterator
from functools import cache

from mpitrain.compress import AnyCodec, CodecError, parse
from mpitrain.compress.codec import LinearCodec, Remembering, Sparse, feedback_of
from mpitrain.compress.dgc import DGC
from mpitrain.config.sync import Compress
from mpitrain.config.tables import Tables

_parsed = cache(parse)


def features(job: Tables) -> set[str]:
    """Features of the codec that a job names; none of one that does not exist."""
    try:
        codec = _parsed(job.compress.codec)
    except CodecError:  # the check of the table reports it
        return set()
    has = {
        "clips": isinstance(codec, DGC) and bool(codec.clip),
        "linear": isinstance(codec, LinearCodec),
        "memory": isinstance(codec, Remembering),
        "momentum": isinstance(codec, DGC),
        "residual": feedback_of(codec, job.compress.feedback) == "on",
        "sparse": isinstance(codec, Sparse),
        "votes": getattr(codec, "votes", False),
    }
    return {feature for feature, is_there in has.items() if is_there}


def faults(c: Compress) -> Iterator[tuple[str, str]]:
    """Why a [compress] table is refused, as (key, sentence)."""
    try:
        yield from codec_faults(c, _parsed(c.codec))
    except CodecError as error:
        yield "compress.codec", str(error)


def codec_faults(c: Compress, codec: AnyCodec) -> Iterator[tuple[str, str]]:
    """Keys of a [compress] table that do not fit its codec."""
    feedback = feedback_of(codec)
    if c.feedback == "on" and feedback == "never":
        yield "compress.feedback", f"what {codec} leaves out would grow; set feedback = 'off'"
    if c.feedback == "off" and isinstance(codec, Remembering) and feedback == "on":
        yield "compress.feedback", f"what {codec} keeps is its momentum, too; leave feedback out"
    if c.start and (isinstance(codec, DGC) or getattr(codec, "warmup", 0)):
        yield (
            "compress.start",
            f"{codec} warms up by itself, see its option warmup; leave start out",
        )
