"""The table that says when ranks talk: in every step, after several, late, without the slow."""

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from mpitrain.config.numbers import Count, Part, Positive, Whole

if TYPE_CHECKING:
    from mpitrain.config.tables import Config


class Outer(Struct, frozen=True, forbid_unknown_fields=True):
    """How the anchor follows what the workers have done, ``name:lr=0.7,momentum=0.9``.

    Attributes:
        lr: factor on the mean of the workers' way since the last exchange.
        momentum: of the outer velocity.
    """

    lr: Positive = 1.0
    momentum: Part = 0.0


#: By name, with what an option is when it is left out.
OUTERS = {"plain": Outer(), "momentum": Outer(1.0, 0.9), "nesterov": Outer(0.7, 0.9)}


def parse_outer(text: str) -> tuple[str, Outer]:
    """The name and the options of ``name:option=value,option=value``.

    Raises:
        ValueError: there is no such name, option or value; the message says what there is.
    """
    name, _, rest = text.partition(":")
    if name not in OUTERS:
        raise ValueError(f"there is no {name!r}; there are {', '.join(OUTERS)}")
    given = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if name == "plain" or key not in Outer.__struct_fields__ or not value:
            options = "no options" if name == "plain" else ", ".join(Outer.__struct_fields__)
            raise ValueError(f"{text!r}: {part!r} is no option of {name}, which has {options}")
        given[key] = value
    try:
        return name, msgspec.convert(
            msgspec.structs.asdict(OUTERS[name]) | given, Outer, strict=False
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"{text!r}: {error}") from error


class Sync(Struct, frozen=True, forbid_unknown_fields=True):
    """[sync]

    A worker is a replica of the whole model, with all its stages and tensor ranks.

    Attributes:
        kind: when the workers talk.  ``every_step``: they sum the gradients of each step.
            ``local``: each trains by itself, and after every ``period`` steps they average what
            they have (local SGD; DiLoCo with ``outer``).  ``delayed``: they average the last
            ``period`` steps' updates, which take effect ``delay`` steps later (delayed gradient
            averaging).  ``quorum``: they sum the gradients of each step, and leave out those that
            come last.
        combine: what becomes of the workers' gradients in ``every_step``, and of their ways in
            ``local``: their ``mean``; or ``adasum``, which is the mean of what is parallel and the
            sum of what is orthogonal, for each tensor (Maleki et al. 2021).
        period: steps from one exchange to the next, of ``local`` and ``delayed``.
        start: first steps, which are done as by ``every_step`` (post-local SGD).
        delay: steps after which an exchange takes effect; it is under way meanwhile.
        outer: what becomes of the mean way of the workers in ``local``: ``plain``, the average of
            their weights; ``nesterov:lr=0.7,momentum=0.9`` or ``momentum:...``, an optimiser for
            which that way is the gradient.
        fragments: parts of the model that ``local`` exchanges one after the other, each once in
            ``period`` steps.
        mix: part of its own weights that a worker keeps when an exchange of ``local`` with a
            ``delay`` takes effect; 0 forgets what it did in the meantime.
        state: what becomes of the optimiser's state in an exchange of ``local``: it stays the
            worker's own (``own``), or is averaged, too (``averaged``), at the price of its bytes.
        agree: steps of ``local`` and ``delayed`` after which all ranks tell each other of losses,
            norms and requests to stop, in one message; the records of these steps come together.
        quorum: part of the workers for which a step of ``quorum`` waits.
        behind: steps that the others may be ahead of a worker in ``quorum`` before they wait.
        replay: a ``metrics.jsonl`` of an earlier run with ``quorum``, whose choices are made again.
    """

    kind: Literal["every_step", "local", "delayed", "quorum"] = "every_step"
    combine: Literal["mean", "adasum"] = "mean"
    period: Count = 50
    start: Whole = 0
    delay: Whole = 0
    outer: str = "plain"
    fragments: Count = 1
    mix: Part = 0.5
    state: Literal["own", "averaged"] = "own"
    agree: Count = 1
    quorum: Annotated[float, Meta(gt=0, le=1)] = 0.95
    behind: Count = 4
    replay: str = ""

    @property
    def drifts(self) -> bool:
        """Whether workers have weights of their own between exchanges."""
        return self.kind in ("local", "delayed")

    def needed(self, workers: int) -> int:
        """Workers for which a step of ``quorum`` waits."""
        # 0.95 of 20 is 19, whatever floating-point numbers make of it.
        return max(1, ceil(round(self.quorum * workers, 9)))


#: Keys by the kinds that read them.
_READ = {
    "combine": ("every_step", "local"),
    "period": ("local", "delayed"),
    "start": ("local", "delayed"),
    "delay": ("local", "delayed"),
    "outer": ("local",),
    "fragments": ("local",),
    "mix": ("local",),
    "state": ("local",),
    "agree": ("local", "delayed"),
    "quorum": ("quorum",),
    "behind": ("quorum",),
    "replay": ("quorum",),
}


def sync_conflicts(job: "Config") -> Iterator[tuple[str, str]]:
    """What does not go with workers that talk otherwise than in every step, as (key, sentence)."""
    s, p = job.sync, job.parallel
    for key, kinds in _READ.items():
        if s.kind not in kinds and getattr(s, key) != getattr(Sync(), key):
            who = f"{' and '.join(kinds)} {'do' if len(kinds) > 1 else 'does'}"
            yield f"sync.{key}", f"{s.kind} does not read it, {who}; leave it out"
    if s.combine == "adasum":
        yield from _adasum_conflicts(job)
    if s.kind == "every_step":
        return
    if s.kind == "local":
        yield from _local_conflicts(s)
    if s.agree > 1 and (job.run.on_nonfinite == "skip" or job.run.compute == "float16"):
        yield (
            "sync.agree",
            "to skip a step, and to change the loss scale, all ranks must know of it in that step; "
            "set agree = 1, or on_nonfinite = 'stop' and another compute",
        )
    if job.checkpoint.every % s.agree:
        yield (
            "sync.agree",
            f"checkpoints are written where the ranks agree: checkpoint.every = "
            f"{job.checkpoint.every} must be a multiple of {s.agree}",
        )
    if s.kind == "delayed" and s.delay > s.period and job.compress.codec != "none":
        yield (
            "sync.delay",
            "what codes leave out of an exchange goes with the next one, which starts before this "
            f"one ends: delay = {s.delay} may be at most period = {s.period}; or set "
            "compress.codec = 'none'",
        )
    if p.zero or p.node_shared:
        yield (
            "sync.kind",
            f"{s.kind} has whole workers, each with all of its parameters and optimiser state; set "
            "zero = 0 and node_shared = false, or kind = 'every_step'",
        )
    if p.schedule == "asynchronous":
        yield (
            "sync.kind",
            f"an asynchronous pipeline has updates of its own, and {s.kind} has others; set "
            "another parallel.schedule, or kind = 'every_step'",
        )
    if len(set(p.replicas)) > 1:
        yield (
            "sync.kind",
            f"a worker of {s.kind} is a replica of all stages, and stages of unequal width have "
            "none; give each stage as many, or set kind = 'every_step'",
        )
    if job.model.kind == "recommender":
        yield (
            "sync.kind",
            f"the recommender's tables are spread over the workers, and {s.kind} has whole ones; "
            "set kind = 'every_step'",
        )
    if job.compress.codec == "auto":
        yield (
            "compress.codec",
            f"auto times the sum of gradients of every step, and {s.kind} has others; name a "
            "codec, or set 'none'",
        )
    if job.federated.clients:
        yield (
            "sync.kind",
            f"clients train by themselves and meet in rounds, and workers of {s.kind} otherwise; "
            "set kind = 'every_step', or federated.clients = 0",
        )
    if job.server.ranks or job.server.hogwild:
        yield (
            "sync.kind",
            f"servers say when their workers talk, and {s.kind} does; set kind = 'every_step', or "
            "server.ranks = 0 and server.hogwild = false",
        )
    if s.kind == "quorum":
        yield from _quorum_conflicts(job)


def _adasum_conflicts(job: "Config") -> Iterator[tuple[str, str]]:
    p = job.parallel
    for key, is_set, why in (
        ("compress.codec", job.compress.codec != "none", "codes are of sums; set codec = 'none'"),
        ("parallel.zero", p.zero > 1, "each micro-batch would have its own; set zero = 0 or 1"),
        ("parallel.node_shared", p.node_shared, "is of sums over nodes; set node_shared = false"),
        ("parallel.tensor", p.tensor > 1, "tensor ranks have parts of tensors; set tensor = 1"),
        ("parallel.replicas", len(set(p.replicas)) > 1, "takes stages of as many replicas"),
        ("parallel.schedule", p.schedule == "asynchronous", "takes synchronous schedules"),
        ("model.kind", job.model.kind == "recommender", "its tables are spread over the workers"),
        ("server.ranks", bool(job.server.ranks or job.server.hogwild), "servers take each push"),
        ("federated.clients", bool(job.federated.clients), "the server takes the clients' mean"),
    ):
        if is_set:
            yield key, f"sync.combine = 'adasum': {why}, or combine = 'mean'"


def _local_conflicts(s: Sync) -> Iterator[tuple[str, str]]:
    try:
        parse_outer(s.outer)
    except ValueError as error:
        yield "sync.outer", str(error)
    if s.delay >= s.period:
        yield (
            "sync.delay",
            f"local has at most one exchange of a fragment under way: delay = {s.delay} must be "
            f"less than period = {s.period}, or set kind = 'delayed'",
        )
    if s.fragments > s.period:
        yield (
            "sync.fragments",
            f"{s.fragments} fragments need as many steps; set period to {s.fragments} or more",
        )
    if s.state == "averaged" and s.fragments > 1:
        yield "sync.state", "averaged goes with the whole model at once; set fragments = 1"
    if s.state == "averaged" and s.delay:
        yield (
            "sync.state",
            "what an optimiser has learnt in the meantime cannot be averaged late; set delay = 0, "
            "or state = 'own'",
        )


def _quorum_conflicts(job: "Config") -> Iterator[tuple[str, str]]:
    p, stages = job.parallel, len(job.parallel.replicas) or job.parallel.pipe
    if stages > 1 or p.tensor > 1:
        yield (
            "sync.kind",
            "quorum leaves out workers of one rank, and stages or tensor ranks would have to be "
            "left out together; set pipe = 1 and tensor = 1, or kind = 'every_step'",
        )
    if job.compress.codec != "none":
        yield (
            "compress.codec",
            "quorum gathers gradients at one rank, as they are; set codec = 'none'",
        )
    if job.run.compute == "float16":
        yield (
            "run.compute",
            "quorum takes gradients of several steps, which float16 scales by other factors; set "
            "compute = 'bfloat16' or 'same'",
        )
    if p.checksums:
        yield "parallel.checksums", "messages of quorum carry none; leave it out"
    if p.algorithm not in ("auto", "parameter_server"):
        yield "parallel.algorithm", "quorum sums as parameter_server does; leave it out"
