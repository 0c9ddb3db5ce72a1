"""Keys that are set and that nothing reads: whoever sets them expects something else.

A job that is to run is asked for them, and not every :class:`~mpitrain.config.Config`: a checkpoint
can be read whatever its job says, and a job that the program derives from another one, as those of
clients, keeps keys that it does not read.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from mpitrain.config.validation import Config


class _Readers(NamedTuple):
    """The values of a key with which another one is read."""

    by: str
    values: tuple[Any, ...]


_ADAPTIVE = _Readers("optim.name", ("adam", "adamw", "lamb"))
_SCALED = _Readers("run.compute", ("float16",))
_STEPS = _Readers("optim.schedule", ("step",))
_STALE = _Readers("parallel.schedule", ("asynchronous",))
_WIDE = _Readers("model.kind", ("mlp", "convnet", "vgg", "recommender"))
_GPT = _Readers("model.kind", ("gpt",))
_LOCAL = _Readers("sync.kind", ("local",))
_DRIFTING = _Readers("sync.kind", ("local", "delayed"))
_SERVERS = _Readers("server.hogwild", (False,))

_READ: Mapping[str, _Readers] = {
    "data.path": _Readers("data.name", ("idx", "arrays", "text", "tokens")),
    "data.units": _Readers("data.name", ("text",)),
    "data.vocabulary": _Readers("data.name", ("tokens",)),
    "data.context": _Readers("data.name", ("text", "tokens")),
    **dict.fromkeys(
        ("data.samples", "data.tables", "data.rows"), _Readers("data.name", ("clicks",))
    ),
    "data.test_fraction": _Readers("data.name", ("digits", "arrays", "text", "clicks")),
    "model.hidden": _WIDE,
    "model.channels": _Readers("model.kind", ("convnet", "vgg", "resnet")),
    "model.layers": _GPT,
    "model.heads": _GPT,
    "model.dropout": _GPT,
    "model.experts": _GPT,
    "model.width": _Readers("model.kind", ("gpt", "recommender")),
    "optim.momentum": _Readers("optim.name", ("sgd", "lars")),
    "optim.nesterov": _Readers("optim.name", ("sgd",)),
    "optim.beta1": _ADAPTIVE,
    "optim.beta2": _ADAPTIVE,
    "optim.epsilon": _ADAPTIVE,
    "optim.weight_decay": _Readers("optim.name", ("sgd", "adam", "adamw", "lars", "lamb")),
    "optim.trust": _Readers("optim.name", ("lars",)),
    "optim.milestones": _STEPS,
    "optim.decay": _STEPS,
    "optim.decay_epochs": _Readers("optim.schedule", ("wsd",)),
    "loss.smoothing": _Readers("loss.name", ("cross_entropy",)),
    "loss.ignore_index": _Readers("loss.name", ("cross_entropy",)),
    "run.loss_scale": _SCALED,
    "run.loss_scale_window": _SCALED,
    "parallel.profile": _Readers("parallel.partition", ("auto",)),
    "parallel.links": _Readers("parallel.partition", ("auto",)),
    "parallel.weights": _STALE,
    "parallel.window": _STALE,
    **dict.fromkeys(("sync.outer", "sync.fragments", "sync.state"), _LOCAL),
    **dict.fromkeys(("sync.period", "sync.start", "sync.agree"), _DRIFTING),
    "sync.delay": _Readers("sync.kind", ("delayed",)),
    **dict.fromkeys(
        [f"server.{key}" for key in ("bound", "quorum", "groups", "fetch", "push", "correct")],
        _SERVERS,
    ),
}
#: The parts of [own] that take the place of a key.
_IN_THE_PLACE_OF = {
    "optim.name": "own.optimizer",
    "optim.schedule": "own.schedule",
    "loss.name": "own.loss",
    "model.kind": "own.model",
    "data.name": "own.data",
}


class Brought(NamedTuple):
    """Parts of a job that a program brings itself.

    Attributes:
        kinds: the type of each part, as ``{"own.data": "Subset"}``.
        job: the job before the program's settings; the keys that it sets are not complained of.
    """

    kinds: Mapping[str, str] = MappingProxyType({})
    job: Config = Config()


def unread(job: Config, brought: Brought) -> Iterator[tuple[str, str]]:
    """Keys that are not at their defaults and that nothing reads, as (key, sentence)."""
    usual = Config()
    for key, (by, values) in _READ.items():
        value = attrgetter(by)(job)
        own = _IN_THE_PLACE_OF.get(by, "")
        before = brought.job if own in brought.kinds else usual
        if own and (kind := brought.kinds.get(own) or attrgetter(own)(job)):
            what = own.partition(".")[2]
            reader = f"the {what} that the program brings ({kind})"
        elif value not in values:
            reader = f"{by} = {value!r}"
        else:
            continue
        default = attrgetter(key)(usual)
        if attrgetter(key)(job) not in (default, attrgetter(key)(before)):
            who = f"{' and '.join(map(repr, values))} {'do' if len(values) > 1 else 'does'}"
            hint = f", or set {key.partition('.')[2]} = {default!r}" if default else ""
            yield key, f"{reader} does not read it, {who}; leave it out{hint}"
    for key in ("top", "capacity", "balance", "router_z"):
        if not job.model.experts and getattr(job.model, key) != getattr(usual.model, key):
            yield (
                f"model.{key}",
                "experts = 0 has no router that reads it; set experts, or leave it out",
            )
    if job.own.classes and not (job.own.data or "own.data" in brought.kinds):
        yield (
            "own.classes",
            f"data.name = {job.data.name!r} has its own number of classes; leave it out",
        )
    if job.optim.schedule == "step" and not job.optim.milestones:
        yield (
            "optim.milestones",
            "optim.schedule = 'step' multiplies the rate at these epochs, and there are none; "
            "give some, as [15, 25], or set schedule = 'constant'",
        )
    watches = job.evaluate.patience or job.own.schedule  # which may follow tests
    if job.evaluate.watch != usual.evaluate.watch and not watches:
        yield (
            "evaluate.watch",
            "says by which value training ends early, and with patience = 0 it never does; set "
            "evaluate.patience, or leave watch out (of the best checkpoint, checkpoint.best says "
            "it)",
        )
