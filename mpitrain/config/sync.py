"""The tables that say how workers exchange: when, with whom, and by which codec."""

from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from mpitrain.config.numbers import Count, Part, Positive, ReadBy, Whole
from mpitrain.options import with_options


class Compress(Struct, frozen=True, forbid_unknown_fields=True):
    """[compress]

    Attributes:
        codec: codec of the gradients of matrices between replicas: ``bf16``, ``powersgd:rank=4``
            and others, which docs/communication.md lists; ``none``: no codec.
        feedback: whether the residual, which a step's codes leave out, is added to the next step's
            gradients; ``auto``: where the codec needs it.
        start: first steps without a codec.
        least: elements below which a matrix travels as it is; vectors always do.
        sparse: algorithm that sums the gradients of ``topk`` and ``dgc``: ``recursive_doubling``,
            SparCML's ``split_allgather``, for many ranks that choose alike, or ``pruned_ring``,
            which sends 1/ranks of a rank's pairs at a time: the smallest beyond these go into the
            residual of the rank that has them then.
    """

    codec: str = "none"
    feedback: Annotated[Literal["auto", "on", "off"], ReadBy("codec")] = "auto"
    start: Annotated[Whole, ReadBy("codec")] = 0
    least: Annotated[Whole, ReadBy("codec")] = 1024
    sparse: Annotated[
        Literal["recursive_doubling", "split_allgather", "pruned_ring"], ReadBy("codec")
    ] = "recursive_doubling"


class Outer(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the outer optimiser, ``name:lr=0.7,momentum=0.9``.

    Attributes:
        lr: factor on the workers' mean change since the last exchange.
        momentum: momentum of the outer velocity.
    """

    lr: Positive = 1.0
    momentum: Part = 0.0


#: The defaults of the options, by name.
OUTERS = {"plain": Outer(), "momentum": Outer(1.0, 0.9), "nesterov": Outer(0.7, 0.9)}


def parse_outer(text: str) -> tuple[str, Outer]:
    """The name and the options of ``name:option=value,option=value``.

    Raises:
        ValueError: there is no such name, option or value; the message says what there is.
    """
    name = text.partition(":")[0]
    if name not in OUTERS:
        raise ValueError(f"there is no {name!r}; there are {', '.join(OUTERS)}")
    known = () if name == "plain" else Outer.__struct_fields__
    return name, with_options(text, Outer, known, msgspec.structs.asdict(OUTERS[name]))


class Sync(Struct, frozen=True, forbid_unknown_fields=True):
    """[sync]

    A worker is a replica of the whole model, with all its stages and tensor ranks.

    Attributes:
        kind: time at which the workers talk.  ``every_step``: they sum the gradients of each step.
            ``local``: each trains by itself, and after every ``period`` steps they average their
            weights (local SGD; DiLoCo with ``outer``).  ``delayed``: they average the last
            ``period`` steps' updates, which take effect ``delay`` steps later (delayed gradient
            averaging).
        combine: combination of the workers' gradients in ``every_step``, and of their changes in
            ``local``: the ``mean``; or ``adasum``, which is the mean of what is parallel and the
            sum of what is orthogonal, for each tensor (Maleki et al. 2021).
        period: steps from one exchange to the next, of ``local`` and ``delayed``.
        start: first steps, in which the workers talk as in ``every_step`` (post-local SGD).
        delay: steps after which an exchange of ``delayed`` takes effect; it is under way meanwhile.
        outer: optimiser that takes the mean change of the workers in ``local`` for a gradient:
            ``plain``, which gives the average of their weights; ``nesterov:lr=0.7,momentum=0.9`` or
            ``momentum:...``.
        state: optimiser state of a worker after an exchange of ``local``: its ``own``, or the one
            that is ``averaged`` over all workers, at the price of its bytes.
        agree: steps of ``local`` and ``delayed`` after which all ranks tell each other of losses,
            norms and requests to stop, in one message; the records of these steps come together.
        correct: whether a worker of ``delayed`` goes on with its own updates until their mean
            replaces them; without, it takes them back until the mean comes.
        split: samples of a worker: ``none``, its part of each batch of all; or samples of its own,
            by ``iid``, ``dirichlet``, ``labels`` or ``own`` as ``federated.split`` has them.
        alpha, labels: parameters of ``split``, as of [federated].
    """

    kind: Literal["every_step", "local", "delayed"] = "every_step"
    combine: Literal["mean", "adasum"] = "mean"
    period: Annotated[Count, ReadBy("kind", "local", "delayed")] = 50
    start: Annotated[Whole, ReadBy("kind", "local", "delayed")] = 0
    delay: Annotated[Whole, ReadBy("kind", "delayed")] = 0
    outer: Annotated[str, ReadBy("kind", "local")] = "plain"
    state: Annotated[Literal["own", "averaged"], ReadBy("kind", "local")] = "own"
    agree: Annotated[Count, ReadBy("kind", "local", "delayed")] = 1
    correct: Annotated[bool, ReadBy("kind", "delayed")] = True
    split: Literal["none", "iid", "dirichlet", "labels", "own"] = "none"
    alpha: Annotated[float, msgspec.Meta(gt=0, le=1e9), ReadBy("split", "dirichlet")] = 0.5
    labels: Annotated[Count, ReadBy("split", "labels")] = 2

    @property
    def drifts(self) -> bool:
        """Whether workers have weights of their own between exchanges."""
        return self.kind in ("local", "delayed")

    def exchanges(self, steps: int) -> tuple[int, int]:
        """Exchanges that have taken effect after ``steps`` steps, and the steps since the last."""
        if not self.drifts:
            return steps, 0
        since = max(0, steps - self.start)
        turns, past = divmod(max(0, since - self.delay), self.period)
        return min(steps, self.start) + turns, past if turns else since
