"""Keys that are set and that nothing reads: a job that says them means something else.

A job that is to run is asked for them, and not every :class:`~mpitrain.config.Config`: a checkpoint
can be read whatever its job says, and a job that the program derives from another one, as those of
clients, keeps keys that it does not read.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from mpitrain.config.tables import Config


class _Readers(NamedTuple):
    """The values of a key with which another one is read."""

    by: str
    values: tuple[str, ...]


_ADAPTIVE = _Readers("optim.name", ("adam", "adamw", "lamb"))
_SCALED = _Readers("run.compute", ("float16",))
_STEPS = _Readers("optim.schedule", ("step",))
_STALE = _Readers("parallel.schedule", ("asynchronous",))

_READ: Mapping[str, _Readers] = {
    "optim.momentum": _Readers("optim.name", ("sgd", "lars")),
    "optim.nesterov": _Readers("optim.name", ("sgd",)),
    "optim.beta1": _ADAPTIVE,
    "optim.beta2": _ADAPTIVE,
    "optim.epsilon": _ADAPTIVE,
    "optim.weight_decay": _Readers("optim.name", ("sgd", "adam", "adamw", "lars", "lamb")),
    "optim.trust": _Readers("optim.name", ("lars",)),
    "optim.milestones": _STEPS,
    "optim.decay": _STEPS,
    "loss.smoothing": _Readers("loss.name", ("cross_entropy",)),
    "run.loss_scale": _SCALED,
    "run.loss_scale_window": _SCALED,
    "parallel.profile": _Readers("parallel.partition", ("auto",)),
    "parallel.weights": _STALE,
    "parallel.window": _STALE,
}
#: What a program or a file brings in the place of a key of the job.
_IN_THE_PLACE_OF = {
    "optim.name": "own.optimizer",
    "optim.schedule": "own.schedule",
    "loss.name": "own.loss",
}


def unread(job: Config) -> Iterator[tuple[str, str]]:
    """What is set to something else than its default and read by nothing, as (key, sentence)."""
    usual = Config()
    for key, (by, values) in _READ.items():
        value = attrgetter(by)(job)
        own = _IN_THE_PLACE_OF.get(by, "")
        if own and attrgetter(own)(job):
            what = own.partition(".")[2]
            reader = f"the {what} that the program brings ({attrgetter(own)(job)})"
        elif value not in values:
            reader = f"{by} = {value!r}"
        else:
            continue
        default = attrgetter(key)(usual)
        if attrgetter(key)(job) != default:
            who = f"{' and '.join(map(repr, values))} {'do' if len(values) > 1 else 'does'}"
            hint = f", or set {key.partition('.')[2]} = {default!r}" if default else ""
            yield key, f"{reader} does not read it, {who}; leave it out{hint}"
    if job.optim.schedule == "step" and not job.optim.milestones:
        yield (
            "optim.milestones",
            "optim.schedule = 'step' multiplies the rate at these epochs, and there are none; "
            "give some, as [15, 25], or set schedule = 'constant'",
        )
    if job.evaluate.watch != usual.evaluate.watch and not job.evaluate.patience:
        yield (
            "evaluate.watch",
            "says by which value training ends early, and with patience = 0 it never does; set "
            "evaluate.patience, or leave watch out (of the best checkpoint, checkpoint.best says "
            "it)",
        )
