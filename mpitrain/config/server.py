"""The table of a job whose parameters lie with servers, and what does not go with them."""

from math import ceil
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mpitrain.config.numbers import Count, ReadBy

#: Most workers or groups that push by themselves; more train worse (Mitliagkas et al. 2016).
MOST_GROUPS = 8


class Server(Struct, frozen=True, forbid_unknown_fields=True):
    """[server]

    A clock of a worker is one batch: it pulls the parameters, computes, and pushes its gradient.

    Attributes:
        ranks: server ranks, the last ones of the job; each holds a part of the parameters and the
            optimiser's state of it.  0: there are none, and all ranks sum their gradients.
        bound: clocks that a worker may be ahead of the slowest one (stale synchronous parallel, Ho
            et al. 2013).  0: synchronous.  ``"none"``, or -1: any number.
        quorum: share of the groups for whose gradients a step of ``bound = 0`` waits; the server
            scales their sum to that of all, and drops those that come later (backup workers, Chen
            et al. 2016).  Less than 1 needs ``ranks = 1``.
        groups: groups of workers: a group sums its gradients, and one of its workers pulls and
            pushes for it.  0: each worker is a group.  Beyond 8, gradients are old, and a run says
            so, unless ``bound = 0``.
        fetch: clocks from one pull to the next (Downpour's n_fetch); in between, a worker takes
            steps of plain gradient descent on its own copy.  More than 1 needs ``bound = "none"``.
        push: clocks from one push to the next (Downpour's n_push), which sends the sum of their
            gradients.  More than 1 needs ``bound = "none"``.
        correct: ``predict`` lets workers pull the parameters that momentum leads to.
        window: steps after which all ranks meet, with nothing on its way.  They also meet at the
            end of an epoch and at a checkpoint.
        hogwild: instead of servers, all ranks update one copy of the recommender in their node's
            memory, without locks and without waiting for one another (Niu et al. 2011): updates of
            the same number at the same time may be lost.  ``ranks`` is 0.  ``"tables"``: only the
            embedding tables; the gradients of the rest are summed in each step.
    """

    ranks: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    bound: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | Literal["none"], ReadBy("ranks")
    ] = 3
    quorum: Annotated[float, Meta(gt=0, le=1), ReadBy("ranks")] = 1.0
    groups: Annotated[int, Meta(ge=0, le=2**31 - 1), ReadBy("ranks")] = 0
    fetch: Annotated[Count, ReadBy("ranks")] = 1
    push: Annotated[Count, ReadBy("ranks")] = 1
    correct: Annotated[Literal["none", "predict"], ReadBy("ranks")] = "none"
    window: Count = 64
    hogwild: bool | Literal["tables"] = False

    @property
    def limit(self) -> int | None:
        """The bound; None if there is none."""
        return None if self.bound in (-1, "none") else int(self.bound)

    def needed(self, groups: int) -> int:
        """Groups for which a synchronous step waits."""
        # Rounding errors do not count: 0.95 of 20 groups are 19.
        return max(1, ceil(round(self.quorum * groups, 9)))

    @property
    def synchronous(self) -> bool:
        """Whether all gradients of a step are summed before one update."""
        return self.limit == 0
