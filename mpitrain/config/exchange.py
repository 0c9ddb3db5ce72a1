"""The tables that say how ranks exchange less: what is sent, and when."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from mpitrain.compress import (
    AnyCodec,
    CodecError,
    Linear,
    Momentum,
    Remembering,
    Sparse,
    feedback_of,
    parse,
)
from mpitrain.config.numbers import Whole

if TYPE_CHECKING:
    from mpitrain.config.tables import Config


class Compress(Struct, frozen=True, forbid_unknown_fields=True):
    """[compress]

    Attributes:
        codec: how the gradients of matrices are coded between replicas: ``bf16``,
            ``powersgd:rank=4`` and others, which docs/communication.md lists; ``none``: they are
            not.  ``auto`` times dense sums and a few codes before the first step, and takes the
            fastest on this link, which may be ``none``.
        feedback: whether what a step's codes leave out is added to the next step's gradients;
            ``auto``: where the code needs it.
        start: first steps, in which gradients travel as they are.
        least: elements below which a matrix travels as it is; vectors always do.
        exchange: of codes that do not add up: ``two_phase`` sends each shard to its owner and the
            owner's sum to all; ``gathered`` sends all codes to all, which rounds once, not twice;
            ``auto`` is ``gathered`` on two ranks, where it sends no more, else ``two_phase``.
        flush_every: of codes that add up: steps after which the replicas average what they left
            out, at the price of one dense all-reduce; 0: never.
        level: who codes: each rank (``ranks``); or one rank of each node (``nodes``), the sum of
            its node's gradients, which travel as they are inside of it.
        units: what codes leave out is kept as a ``gradient``, and later has the learning rate of
            the step that sends it; or as an ``update``, the rate of its own step times the
            gradient, so that a rate that falls meanwhile does not change it.
    """

    codec: str = "none"
    feedback: Literal["auto", "on", "off"] = "auto"
    start: Whole = 0
    least: Whole = 1024
    exchange: Literal["auto", "two_phase", "gathered"] = "auto"
    flush_every: Whole = 0
    units: Literal["gradient", "update"] = "gradient"
    level: Literal["ranks", "nodes"] = "ranks"


def compress_conflicts(job: "Config") -> Iterator[tuple[str, str]]:
    """What does not go with the codes of gradients, as (key, sentence)."""
    c, p = job.compress, job.parallel
    if c.codec == "none":
        if c != Compress():
            yield "compress.codec", "none, and other keys of the table say how; name a codec"
        return
    if p.schedule == "asynchronous":
        yield "compress.codec", "asynchronous pipelines send gradients as they are; leave it out"
    if c.codec == "auto":
        if job.server.ranks:
            yield "compress.codec", "auto times sums, and servers take pushes; name a codec"
        if p.zero > 1 or p.node_shared:
            where = "node_shared does" if p.node_shared else "zero = 2 and 3 do"
            yield "compress.codec", f"auto tries codes that {where} not take; name one"
        if Compress("auto", start=c.start, least=c.least) != c:
            yield "compress.codec", "auto chooses the code; of other keys it takes start and least"
        return
    try:
        code = parse(c.codec)
    except CodecError as error:
        yield "compress.codec", str(error)
        return
    yield from code_conflicts(c, code)
    if c.level == "nodes":
        yield from _node_conflicts(job, code)
    if c.units == "update" and job.sync.drifts:
        yield "compress.units", "workers exchange ways, which are updates; leave units out"
    if job.server.ranks:
        yield from _pushed_conflicts(c, code)
    if p.zero > 1:
        yield from _scattered_conflicts(c, code, "zero = 2 and 3 keep", "zero = 1")
    if p.node_shared:
        yield from _scattered_conflicts(c, code, "node_shared keeps", "node_shared = false")
    if getattr(code, "votes", False) and p.node_shared:
        yield "compress.codec", f"{code} is no sum of nodes' sums; set node_shared = false"
    if c.exchange == "gathered" and p.zero:
        yield "compress.exchange", "gathered gives every rank the whole sum; set zero = 0"
    is_plain = job.own.optimizer or (job.optim.name == "sgd" and not job.optim.momentum)
    if isinstance(code, Momentum) and not is_plain:
        yield "compress.codec", f"{code} has the momentum; set optim.name = 'sgd' and momentum = 0"
    alone = p.pipe == 1 and p.tensor == 1 and len(p.replicas) < 2
    if isinstance(code, Momentum) and code.clip and (not alone or job.model.kind == "recommender"):
        yield (
            "compress.codec",
            f"the clip of {code} is of a replica's whole gradient, of which each rank has a part "
            "here; leave clip out, or set pipe = 1, tensor = 1 and another model",
        )
    if getattr(code, "votes", False):
        if p.zero:
            yield "compress.codec", f"{code} gives every rank the whole vote; set zero = 0"
        if job.sync.drifts and (job.sync.kind == "delayed" or job.sync.outer == "plain"):
            yield (
                "compress.codec",
                f"{code} has no size, and would move each weight by 1 in an exchange; set another "
                "codec, or sync.kind = 'local' with sync.outer = 'momentum:lr=0.001,momentum=0'",
            )


def _node_conflicts(job: "Config", code: AnyCodec) -> Iterator[tuple[str, str]]:
    """What does not go with codes of nodes' sums."""
    p = job.parallel
    if isinstance(code, Remembering):
        yield "compress.level", f"{code} is of each rank's own gradients; set level = 'ranks'"
    if p.zero:
        yield "compress.level", "a node's sum is whole on one rank; set zero = 0 or level = 'ranks'"
    if p.node_shared:
        yield "compress.level", "node_shared codes between nodes by itself; leave level out"


def _pushed_conflicts(c: Compress, code: AnyCodec) -> Iterator[tuple[str, str]]:
    """What does not go with gradients that are pushed to servers, each by itself."""
    if isinstance(code, Linear | Sparse | Remembering):
        yield (
            "compress.codec",
            f"a server has a part of the gradient, and {code} is of whole matrices or remembers "
            "what it sent; take a code of single numbers, as bf16 or int8:rounding=stochastic",
        )
    elif c.feedback == "on" or (c.feedback == "auto" and feedback_of(code) == "on"):
        yield (
            "compress.feedback",
            f"what {code} leaves out of a push is not kept; take an unbiased code, as "
            "int8:rounding=stochastic, or set feedback = 'off'",
        )
    for key in ("start", "least", "exchange", "units", "level"):
        if getattr(c, key) != getattr(Compress(), key):
            yield f"compress.{key}", "a push is coded whole and goes to a server; leave it out"


def _scattered_conflicts(
    c: Compress, code: AnyCodec, who: str, instead: str
) -> Iterator[tuple[str, str]]:
    """What does not go with ranks that keep shards of summed gradients alone."""
    if isinstance(code, Linear | Sparse | Remembering):
        yield (
            "compress.codec",
            f"{who} shards of sums, and {code} is of whole ones; take a code of single numbers, as "
            f"bf16 or int8:rounding=stochastic, or set {instead}",
        )
    elif c.feedback == "on" or (c.feedback == "auto" and feedback_of(code) == "on"):
        yield (
            "compress.feedback",
            f"{who} shards alone, and what {code} leaves out is as large as the gradients; take an "
            "unbiased code, as int8:rounding=stochastic, or set feedback = 'off', or "
            f"{instead}",
        )


def code_conflicts(c: Compress, code: AnyCodec) -> Iterator[tuple[str, str]]:
    """What of the table does not go with its code, as (key, sentence)."""
    is_linear = isinstance(code, Linear)
    if is_linear and c.exchange != "auto":
        yield "compress.exchange", f"{code} adds up and goes by all-reduces; leave exchange out"
    if c.flush_every and (not is_linear or c.feedback == "off" or feedback_of(code) == "never"):
        yield "compress.flush_every", f"{code} keeps nothing that drifts apart; leave it out"
    has_residual = (feedback_of(code) if c.feedback == "auto" else c.feedback) == "on"
    if c.units == "update" and (not has_residual or isinstance(code, Remembering)):
        yield "compress.units", f"{code} keeps no residual here; leave units out"
    if c.feedback == "on" and feedback_of(code) == "never":
        yield "compress.feedback", f"what {code} leaves out would grow; set feedback = 'off'"
    if c.feedback == "off" and isinstance(code, Remembering) and feedback_of(code) == "on":
        yield "compress.feedback", f"what {code} keeps is its momentum, too; leave feedback out"
    if isinstance(code, Sparse) and c.exchange != "auto":
        yield "compress.exchange", f"{code} goes by the sparse all-reduce; leave exchange out"
    if isinstance(code, Momentum) and c.start:
        yield "compress.start", f"{code} warms up by itself, see its option warmup; leave start out"
    if getattr(code, "votes", False) and c.exchange == "gathered":
        yield "compress.codec", f"{code} needs the owners of two_phase"
