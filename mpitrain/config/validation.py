"""A job whose tables fit together, and the checks of single keys and of keys that must fit."""

import math
from collections.abc import Iterator
from typing import get_args

import msgspec

from mpitrain import extras
from mpitrain.config.conflicts import refusals
from mpitrain.config.federated import Federated
from mpitrain.config.metric_names import refusal
from mpitrain.config.numbers import norm_groups
from mpitrain.config.sync import Compress, parse_outer
from mpitrain.config.tables import InV, Tables

#: Why a key is refused, as (key, sentence).
Faults = Iterator[tuple[str, str]]


#: Most micro-batches of a batch with fewer samples; the schedule of all is proved before it runs.
_MOST_EMPTY = 1024


class Config(Tables, frozen=True, forbid_unknown_fields=True):
    """A training job; each attribute is the TOML table of its name."""

    def __post_init__(self) -> None:
        """Raises ``ValueError``: values that cannot be, or methods that do not go together."""
        for place, why in (*refusals(self), *faults(self)):
            raise ValueError(f"{place}: {why}")


def faults(job: Tables) -> Faults:
    """Values that a job may not have."""
    for place, value in _values(job):
        if why := _unwritable(value):
            yield place, why
    if not job.run.dir:
        yield "run.dir", "is empty; name a folder, or leave it out"
    if job.run.on_spike != "go_on" and not job.checkpoint.every:
        yield (
            "run.on_spike",
            "goes back to checkpoints, and checkpoint.every = 0 writes none; set it",
        )
    yield from _layout(job)
    yield from _model(job)
    yield from _rates(job)
    yield from _compress(job)
    yield from _sync(job)
    if job.server.ranks or job.server.hogwild:
        yield from _server(job)
    if job.federated.clients:
        yield from _federated(job.federated)
        if job.train.steps:
            yield "train.steps", "a client takes the steps of its epochs; set federated.rounds"


def _values(job: Tables) -> Iterator[tuple[str, object]]:
    """All keys of a job with their values."""
    for table, values in msgspec.structs.asdict(job).items():
        for key, value in msgspec.structs.asdict(values).items():
            yield f"{table}.{key}", value
    for number, group in enumerate(job.optim.groups):
        for key, value in msgspec.structs.asdict(group).items():
            yield f"optim.groups[{number}].{key}", value


def _unwritable(value: object) -> str:
    """Why a checkpoint could not give a value back; empty if it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, not {value}"
    if isinstance(value, str):
        if "\0" in value:
            return "must not hold the character NUL"
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"is not UTF-8: {value!r}"
    return ""


def _layout(job: Tables) -> Faults:
    p, stages = job.parallel, job.stages
    if p.replicas and (p.pipe not in (1, len(p.replicas)) or p.data):
        yield "parallel.replicas", "gives the stages and their replicas; leave out pipe and data"
    in_v = p.schedule in get_args(InV)
    chunks = 2 if in_v else p.chunks
    if isinstance(p.partition, tuple) and len(p.partition) != stages * chunks:
        yield (
            "parallel.partition",
            f"{len(p.partition)} numbers for {stages} stages of {chunks} chunks",
        )
    if p.partition == "auto" and not p.profile:
        yield "parallel.partition", "auto needs parallel.profile, a file of mpitrain profile"
    most = max(job.train.batch_size, _MOST_EMPTY)
    if job.train.micro_batches > most:
        yield (
            "train.micro_batches",
            f"a batch of {job.train.batch_size} samples has no {job.train.micro_batches} parts; "
            f"take at most {most}",
        )
    if p.chunks > 1 and p.schedule != "interleaved" and not (in_v and p.chunks == 2):
        has = "two chunks" if in_v else "one chunk"
        yield "parallel.chunks", f"{p.schedule} has {has} a stage; set schedule = 'interleaved'"


def _model(job: Tables) -> Faults:
    m, p, context = job.model, job.parallel, job.data.context
    if m.kind == "gpt" and m.width % m.heads:
        yield (
            "model.heads",
            f"{m.heads} heads do not divide a width of {m.width}; take another number of heads, or "
            f"a width of {-(-m.width // m.heads) * m.heads}",
        )
    if m.kind == "gpt" and m.heads % p.tensor:
        yield (
            "parallel.tensor",
            f"{p.tensor} ranks cannot share {m.heads} heads equally; take a number that divides "
            "model.heads",
        )
    for channels in m.channels if m.kind == "resnet" else ():
        if (norms := norm_groups(channels)) % p.tensor:
            yield (
                "parallel.tensor",
                f"{p.tensor} ranks cannot share the {norms} groups of {channels} channels that are "
                "normed together; take a power of 2, and channels in multiples of 8",
            )
    pieces = p.context * (2 if p.attention == "zigzag" else 1)
    if m.kind == "gpt" and p.context > 1 and context < pieces:
        yield (
            "parallel.context",
            f"{context} positions cannot be cut into {pieces} pieces; take fewer ranks or a longer "
            "data.context",
        )
    if m.experts and m.top > m.experts:
        yield "model.top", f"a position cannot go through {m.top} of {m.experts} experts"
    if p.experts > 1 and not m.experts:
        yield "parallel.experts", "the model has none to share; set model.experts, or leave it out"
    if p.sequence and context % p.tensor:
        yield (
            "parallel.sequence",
            f"{p.tensor} ranks cannot share {context} positions; take a data.context that "
            f"{p.tensor} divides, or set sequence = false",
        )
    for name in job.evaluate.metrics:
        if why := refusal(name, job.loss.name):
            yield "evaluate.metrics", why


def _rates(job: Tables) -> Faults:
    optim, passes = job.optim, job.passes
    warmup, falling = optim.warmup_epochs, optim.decay_epochs
    if warmup >= passes:
        key = "federated.rounds" if job.federated.clients else "train.epochs"
        yield "optim.warmup_epochs", f"{warmup:g} must be less than {key} = {passes}; set both"
    if warmup and optim.warmup_steps:
        yield "optim.warmup_steps", f"warmup_epochs = {warmup:g} says the same; leave one out"
    if optim.schedule == "wsd" and not 0 < falling <= passes - warmup:
        yield (
            "optim.decay_epochs",
            f"wsd falls in more than 0 and at most {passes - warmup:g} epochs, which warm-up "
            f"leaves of train.epochs, not {falling:g}",
        )
    if optim.schedule == "one_cycle" and not (warmup or optim.warmup_steps):
        yield "optim.warmup_epochs", "one_cycle climbs in these epochs; give 3 of 10, for example"


def _compress(job: Tables) -> Faults:
    if job.compress.codec == "none":
        return
    yield from extras.faults_of_codec(job.compress)
    for key in ("start", "least"):
        if job.server.ranks and getattr(job.compress, key) != getattr(Compress(), key):
            yield f"compress.{key}", "a push to a server is coded whole; leave it out"


def _sync(job: Tables) -> Faults:
    try:
        parse_outer(job.sync.outer)
    except ValueError as error:
        yield "sync.outer", str(error)


def _server(job: Tables) -> Faults:
    own, is_server = job.server, bool(job.server.ranks)
    if job.parallel.data or job.parallel.replicas:
        key = "data" if job.parallel.data else "replicas"
        yield f"parallel.{key}", "the ranks that are no servers are the workers; leave it out"
    if own.hogwild is True and job.parallel.algorithm != "auto":
        yield "parallel.algorithm", "hogwild = true sums nothing; leave it out, or take 'tables'"
    for key, value in (("fetch", own.fetch), ("push", own.push)):
        if is_server and value > 1 and own.limit is not None:
            yield (
                f"server.{key}",
                "a bound counts clocks in each of which a worker pulls and pushes; set it to 1, or "
                "server.bound = 'none'",
            )
    if is_server and own.correct != "none" and own.synchronous:
        yield "server.correct", "server.bound = 0 has no older gradients; set 'none'"
    if own.quorum < 1 and (not own.synchronous or own.ranks != 1):
        yield "server.quorum", "one server leaves out late pushes; set ranks = 1 and bound = 0"
    if own.correct == "predict" and not job.optim.momentum:
        yield "server.correct", "predict looks ahead along the momentum of sgd; set optim.momentum"


def _federated(own: Federated) -> Faults:
    if own.scheme == "weighted" and own.sample > own.clients:
        yield "federated.sample", f"there are {own.clients} clients, and {own.sample} are asked"
    if own.take > own.asked:
        yield "federated.take", f"{own.asked} clients are asked, and {own.take} are to be taken"
    if own.clip and not own.is_coded:
        yield "federated.clip", "cuts numbers on a grid; set bits, rotate, kept or secure, too"
    if own.secure and own.taken < 3:
        yield (
            "federated.secure",
            f"each of {own.taken} clients knows from the sum what the other has sent; take 3 or "
            "more",
        )
    if own.secure and own.scheme == "weighted" and own.taken < own.least(own.asked):
        yield (
            "federated.threshold",
            f"{own.least(own.asked)} of the {own.asked} clients that are asked must stay, and "
            f"{own.taken} are taken; raise take, or lower sample or threshold",
        )
