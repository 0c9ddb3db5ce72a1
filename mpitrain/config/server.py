"""The table of a job whose parameters lie with servers, and what does not go with them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from mpitrain.config.numbers import Count

if TYPE_CHECKING:
    from mpitrain.config.tables import Config

#: Beyond so many that push by themselves, training gets worse (Mitliagkas et al. 2016).
MOST_GROUPS = 8


class Server(Struct, frozen=True, forbid_unknown_fields=True):
    """[server]

    A clock of a worker is one batch: it pulls the parameters, computes, and pushes its gradient.

    Attributes:
        ranks: server ranks, the last ones of the job; each holds a part of the parameters and the
            optimiser's state of it.  0: there are none, and all ranks sum their gradients.
        bound: clocks that a worker may be ahead of the slowest one (stale synchronous parallel, Ho
            et al. 2013).  0: synchronous.  ``"none"``, or -1: any number.
        groups: so many groups of workers sum their gradients, and one of each pulls and pushes for
            all of it.  0: each worker is a group by itself.  At most 8, but for ``bound = 0``.
        fetch: clocks from one pull to the next (Downpour's n_fetch); in between, a worker takes
            steps of plain gradient descent on its own copy.  More than 1 needs ``bound = "none"``.
        push: clocks from one push to the next (Downpour's n_push), which is of their sum.  More
            than 1 needs ``bound = "none"``.
        correct: what is done about gradients of older parameters.  ``rate`` divides the rate by 1 +
            the lag (Zhang et al. 2016); ``delay`` adds ``compensation`` * g * g * (now - pulled) to
            the gradient g (DC-ASGD, Zheng et al. 2017); ``predict`` lets workers pull what momentum
            will have made of the parameters.
        compensation: factor of ``delay``.
        window: steps after which all ranks meet, with nothing on its way.  They also meet at the
            end of an epoch and at a checkpoint.
        replay: folder of a run whose servers' logs say in which order pulls and pushes are served.
        hogwild: instead of servers, all ranks update one copy of the recommender in their node's
            memory, without locks and without waiting for one another (Niu et al. 2011): updates of
            the same number at the same time may be lost.  ``ranks`` is 0.  ``"tables"``: only the
            embedding tables; the gradients of the rest are summed in each step.
    """

    ranks: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    bound: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | Literal["none"] = 3
    groups: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    fetch: Count = 1
    push: Count = 1
    correct: Literal["none", "rate", "delay", "predict"] = "none"
    compensation: Annotated[float, Meta(ge=0)] = 0.04
    window: Count = 64
    replay: str = ""
    hogwild: bool | Literal["tables"] = False

    @property
    def limit(self) -> int | None:
        """The bound; None if there is none."""
        return None if self.bound in (-1, "none") else int(self.bound)

    @property
    def synchronous(self) -> bool:
        """Whether all gradients of a step are summed before one update."""
        return self.limit == 0


def server_conflicts(job: "Config") -> Iterator[tuple[str, str]]:
    """What does not go with servers, as (key, sentence)."""
    own, p = job.server, job.parallel
    if own.hogwild:
        yield from _hogwild_conflicts(job)
        yield from _layout_conflicts(job)
        return
    if not own.ranks:
        if own.replay:
            yield "server.replay", "a log is replayed by servers; set server.ranks as in its run"
        return
    yield from _layout_conflicts(job)
    if own.groups > MOST_GROUPS and not own.synchronous:
        yield (
            "server.groups",
            f"{own.groups} groups would push by themselves; beyond {MOST_GROUPS}, gradients are "
            "too old to learn well from (Mitliagkas et al. 2016); make fewer and larger ones, or "
            "set server.bound = 0",
        )
    for key, value in (("fetch", own.fetch), ("push", own.push)):
        if value > 1 and own.limit is not None:
            yield (
                f"server.{key}",
                "a bound counts clocks in each of which a worker pulls and pushes; set it to 1, or "
                "server.bound = 'none'",
            )
    if own.correct != "none" and own.synchronous:
        yield "server.correct", "server.bound = 0 has no older gradients; set 'none'"
    if own.correct == "predict" and (job.optim.name != "sgd" or not job.optim.momentum):
        yield "server.correct", "predict looks ahead along the velocity of sgd with momentum"
    if own.correct == "predict" and job.optim.groups:
        yield "server.correct", "predict has one rate for all; leave optim.groups out"
    if job.optim.name in ("lars", "lamb"):
        yield (
            "optim.name",
            f"{job.optim.name} needs norms of whole tensors, of which a server has parts; take "
            "sgd, adam or adamw",
        )
    if job.optim.clip_norm:
        yield "optim.clip_norm", "no server has the gradient of the whole model; leave it out"
    if job.own.optimizer:
        yield "own.optimizer", "servers have the job's own sgd, adam and adamw; leave it out"
    if p.checksums:
        yield "parallel.checksums", "messages to and from servers carry none; leave it out"
    if job.model.kind == "recommender":
        yield (
            "model.kind",
            "the recommender's tables are spread over data-parallel ranks, and servers do not hold "
            "them; set server.hogwild = true or server.ranks = 0",
        )


def _hogwild_conflicts(job: "Config") -> Iterator[tuple[str, str]]:
    """What does not go with one copy that all update."""
    own, optim = job.server, job.optim
    if job.compress.codec != "none":
        yield "compress.codec", "one copy that all update needs no messages; set codec = 'none'"
    if own.ranks:
        yield "server.hogwild", "all ranks update one copy, and none is a server; set ranks = 0"
    if own.hogwild is True and job.parallel.algorithm != "auto":
        yield "parallel.algorithm", "hogwild = true sums nothing; leave it out, or take 'tables'"
    for name in ("bound", "groups", "fetch", "push", "correct", "replay"):
        if getattr(own, name) != getattr(Server(), name):
            yield f"server.{name}", "is of servers, and hogwild has none; leave it out"
    if job.model.kind != "recommender" or job.own.model:
        yield (
            "server.hogwild",
            f"a {job.model.kind} changes all numbers in each step, and most updates would be lost; "
            "it is for the recommender, whose samples change a few rows",
        )
    if (
        optim.name != "sgd"
        or optim.momentum
        or optim.weight_decay
        or optim.clip_norm
        or optim.average
        or optim.groups
    ):
        yield (
            "server.hogwild",
            "has plain gradient descent, which changes only what a sample uses; set optim.name = "
            "'sgd' and momentum = 0, without weight_decay, clip_norm, average and groups",
        )


def _layout_conflicts(job: "Config") -> Iterator[tuple[str, str]]:
    """Layouts whose workers hold more or less than the whole model."""
    p = job.parallel
    for key, is_set in (
        ("pipe", p.pipe > 1),
        ("tensor", p.tensor > 1),
        ("replicas", bool(p.replicas)),
        ("zero", p.zero > 0),
        ("node_shared", p.node_shared),
        ("offload", bool(p.offload)),
    ):
        if is_set:
            yield f"parallel.{key}", "a worker has the whole model; leave it out"
    if p.data:
        yield "parallel.data", "the ranks that are no servers are the workers; leave it out"
    if p.schedule == "asynchronous":
        yield "parallel.schedule", "is that of a pipeline, and workers have none"
    if job.run.check_every:
        yield "run.check_every", "workers are no replicas, which are compared; leave it out"
    if job.run.compute == "float16":
        yield "run.compute", "workers never skip a step, as a loss scale needs; take bfloat16"
    if job.run.on_nonfinite == "skip":
        yield "run.on_nonfinite", "of workers, what is not finite ends the run; set 'stop'"
