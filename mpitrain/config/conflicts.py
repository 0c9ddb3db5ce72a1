"""What a job may not say: values that no checkpoint gives back, keys that do not go together."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from mpitrain.config.device import cpu_alone
from mpitrain.config.exchange import compress_conflicts
from mpitrain.config.federated import federated_conflicts
from mpitrain.config.metric_names import refusal
from mpitrain.config.sync import sync_conflicts

if TYPE_CHECKING:
    from mpitrain.config.tables import Config, Optim


#: Of a model of one's own, the kind is what nobody has set.
_KINDS_ALONE = "layers of model.kind = {}, and for no other kind and no model of one's own"


def unwritable(job: "Config") -> Iterator[tuple[str, str]]:
    """Values that a checkpoint could not give back, as (key, sentence)."""
    return ((place, why) for place, value in _values(job) if (why := _why(value)))


def _values(job: "Config") -> Iterator[tuple[str, object]]:
    """All that a job says, as (key, value)."""
    for table in msgspec.structs.fields(job):
        values = getattr(job, table.name)
        for field in msgspec.structs.fields(values):
            yield f"{table.name}.{field.name}", getattr(values, field.name)
    for number, group in enumerate(job.optim.groups):
        for key, value in msgspec.structs.asdict(group).items():
            yield f"optim.groups[{number}].{key}", value


def _why(value: object) -> str:
    """Why a checkpoint could not give a value back, or nothing."""
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


def conflicts(job: "Config") -> Iterator[tuple[str, str]]:
    """What does not go together, as (key, sentence)."""
    p, m = job.parallel, job.model
    stages = len(p.replicas) or p.pipe
    if p.replicas and (p.pipe not in (1, len(p.replicas)) or p.data):
        yield "parallel.replicas", "gives the stages and their replicas; leave out pipe and data"
    if isinstance(p.partition, tuple) and len(p.partition) != stages * p.chunks:
        yield (
            "parallel.partition",
            f"{len(p.partition)} numbers for {stages} stages of {p.chunks} chunks",
        )
    if p.partition == "auto" and not p.profile:
        yield "parallel.partition", "auto needs parallel.profile, a file of mpitrain profile"
    if p.chunks > 1 and p.schedule != "interleaved":
        yield "parallel.chunks", f"{p.schedule} has one chunk a stage; set schedule = 'interleaved'"
    if p.tensor > 1 and m.kind not in ("gpt", "mlp"):
        yield "parallel.tensor", f"is for {_KINDS_ALONE.format('gpt or mlp')}; set tensor = 1"
    if p.sequence and m.kind != "gpt":
        yield "parallel.sequence", f"is for {_KINDS_ALONE.format('gpt')}; leave it out"
    if m.kind == "gpt" and m.width % m.heads:
        yield "model.heads", f"{m.heads} heads do not divide a width of {m.width}"
    if m.kind == "gpt" and m.heads % p.tensor:
        yield "parallel.tensor", f"{p.tensor} ranks cannot share {m.heads} heads equally"
    if p.sequence and job.data.context % p.tensor:
        yield "parallel.sequence", f"{p.tensor} ranks cannot share {job.data.context} positions"
    if (m.kind == "gpt") != (job.data.name in ("text", "tokens")):
        yield "model.kind", f"a {m.kind} cannot be trained on {job.data.name}"
    if (m.kind == "recommender") != (job.data.name == "clicks"):
        yield "model.kind", f"a {m.kind} cannot be trained on {job.data.name}"
    if job.loss.smoothing and job.loss.name != "cross_entropy":
        yield "loss.smoothing", f"{job.loss.name} has no classes to spread labels over"
    for name in job.evaluate.metrics:
        if why := refusal(name, job.loss.name):
            yield "evaluate.metrics", why
    yield from _schedule_conflicts(job.optim, job.passes)
    yield from compress_conflicts(job)
    yield from federated_conflicts(job)
    if job.run.device == "cuda" and (why := cpu_alone(job)):
        place, _, reason = why.partition(": ")
        yield place, f"{reason}; leave it out, or set run.device = 'cpu'"
    yield from sync_conflicts(job)
    if p.zero and p.node_shared:
        yield "parallel.node_shared", "shards the optimiser by itself; set zero = 0"
    if len(set(p.replicas)) > 1 and (p.zero or p.node_shared):
        yield "parallel.replicas", "stages of unequal width keep whole replicas; set zero = 0"
    if m.kind == "recommender" and (stages > 1 or p.zero or p.node_shared):
        yield "model.kind", "the recommender's tables are spread over data-parallel ranks alone"
    if p.schedule == "asynchronous":
        if p.zero or p.node_shared or len(set(p.replicas)) > 1:
            yield "parallel.schedule", "asynchronous keeps whole replicas of equal width"
        if job.run.compute != "same" or job.optim.name in ("lars", "lamb"):
            yield "parallel.schedule", "asynchronous has sgd and adam, and one type of number"
        if job.optim.clip_norm:
            yield (
                "optim.clip_norm",
                "asynchronous never has a gradient of the whole model to clip; leave it out, or "
                "set parallel.schedule = '1f1b'",
            )
        if job.optim.groups:
            yield "optim.groups", "asynchronous updates all parameters alike; leave them out"
        if p.weights in ("spectrain", "linear") and job.optim.name != "sgd":
            yield "parallel.weights", f"{p.weights} looks ahead along the velocity of sgd"


def _schedule_conflicts(optim: "Optim", epochs: int) -> Iterator[tuple[str, str]]:
    """What does not go with the schedule of the learning rate over so many epochs."""
    falling, left = optim.decay_epochs, epochs - optim.warmup_epochs
    if optim.schedule == "wsd" and not 0 < falling <= left:
        yield (
            "optim.decay_epochs",
            f"wsd falls in more than 0 and at most {left:g} epochs, which warm-up leaves of "
            f"train.epochs, not {falling:g}",
        )
    if falling and optim.schedule != "wsd":
        yield "optim.decay_epochs", f"{optim.schedule} has no such part; set schedule = 'wsd'"
    if optim.schedule == "one_cycle" and not optim.warmup_epochs:
        yield "optim.warmup_epochs", "one_cycle climbs in these epochs; give 3 of 10, for example"
