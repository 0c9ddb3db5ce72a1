"""Ranks that tell one another what they are about to do, so that they go on together or not at
all."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.execution.waiting import give_way
from mpitrain.arrays import Array

#: What a rank can be about to do.
BEGIN = "wraps a module"
FORWARD = "goes forward in training"
AVERAGE = "averages gradients"
GIVE_UP = "gives up a backward pass that raised an error"
CLOSE = "closes"
JOIN = "begins a join"
WEIGH = "weighs its batch"
HOOK = "registers a communication hook"
#: Whatever the others do, this rank does it with nothing of its own.
JOINED = "has no batch left"
_ALL = (BEGIN, FORWARD, AVERAGE, GIVE_UP, CLOSE, JOIN, WEIGH, HOOK, JOINED)
#: What ranks do that have a batch, while others have none left.
_DURING_JOIN = (FORWARD, AVERAGE, GIVE_UP, WEIGH)
#: Less than what any rank says.
_NOTHING = -(2**62)

_CHANNEL = MPI.Comm.Create_keyval()


class Parted(RuntimeError):
    """The ranks are in different places of the program; they cannot go on."""


class Final(str):
    """A fault after which sums that were started do not end."""


class Refused(RuntimeError):
    """A rank has found a fault in what the ranks were about to do.

    Attributes:
        doing: that.
        final: sums that were started do not end.
    """

    def __init__(self, message: str, doing: str = "", *, final: bool = False) -> None:
        super().__init__(message)
        self.doing, self.final = doing, final


class Agreed(NamedTuple):
    """What the ranks have told one another.

    Attributes:
        doing: what those do that have a batch; ``JOINED`` if there are none.
        first: the lowest rank of those.
        joined: some ranks have no batch left.
        numbers: the largest of each over those, of shape (3,).
    """

    doing: str
    first: int
    joined: bool
    numbers: Array


def channel(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A duplicate where all replicas on ``comm`` meet, and nobody else; collective at first use."""
    found = comm.Get_attr(_CHANNEL)
    if not isinstance(found, MPI.Intracomm):
        found = MPI.Intracomm(comm).Dup()
        comm.Set_attr(_CHANNEL, found)
    return found


def meet(
    comm: MPI.Intracomm,
    doing: str,
    where: int,
    numbers: tuple[int, int, int],
    fault: str,
    idle: Callable[[], None],
) -> Agreed:
    """What all ranks are about to do; collective.

    Args:
        comm: a :func:`channel`.
        doing: one of the above.
        where: the number of the replica.
        numbers: any; those of ranks that have joined do not count.
        fault: why this rank cannot go on, if it cannot.
        idle: called while waiting.

    Raises:
        Parted: on all ranks, if they do different things.
        Refused: on all ranks, if one has a fault.
    """
    own = _ALL.index(doing)
    said = [own, -own, -comm.rank, *numbers]
    if doing == JOINED:
        said = [_NOTHING] * len(said)
    most = largest(comm, [where, -where, bool(fault), doing == JOINED, *said], idle)
    apart, joined = most[0] != -most[1], bool(most[3])
    ended = most[4] == _NOTHING
    act = JOINED if ended else _ALL[most[4]]
    alike = ended or (most[4] == -most[5] and (act in _DURING_JOIN or not joined))
    together = alike and not apart
    if together and (ended or not most[2]):
        return Agreed(act, -int(most[6]), joined, most[7:])
    told = comm.allgather((doing, where, fault))
    faults = in_words([why for _, _, why in told])
    if not together:
        places = ", ".join(
            f"rank {rank} {what}{f' in DataParallel {number}' if apart else ''}"
            for rank, (what, number, _) in enumerate(told)
        )
        raise Parted(
            f"the replicas have parted: {places}{faults and f' ({faults})'}; all ranks must go "
            "forward and backward equally often and in one order (after a backward pass that "
            "reached none of the module's parameters on a rank, call reduce() on all of them)"
        )
    final = any(isinstance(why, Final) for _, _, why in told)
    raise Refused(f"DataParallel: {faults}", act, final=final)


def in_words(faults: Sequence[str]) -> str:
    """Those that ranks have."""
    return "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(faults) if why)


def largest(comm: MPI.Intracomm, numbers: Sequence[int], idle: Callable[[], None]) -> Array:
    """The largest of each of ``numbers`` over the ranks, as many on each; collective."""
    return _reduced(comm, np.array(numbers, np.int64), MPI.MAX, idle)


def total(comm: MPI.Intracomm, number: float, idle: Callable[[], None]) -> float:
    """The sum of a number over the ranks; collective."""
    return float(_reduced(comm, np.array([number], np.float64), MPI.SUM, idle)[0])


def _reduced(comm: MPI.Intracomm, mine: Array, by: MPI.Op, idle: Callable[[], None]) -> Array:
    found = np.empty_like(mine)
    request = comm.Iallreduce(mine, found, by)
    while not request.Test():
        idle()
        give_way()  # a rank that we wait for may need this core
    return found
