"""Replicas tell one another their next act, so that they go on together or not at all."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.execution.waiting import give_way
from mpitrain.arrays import Array

#: Acts of a rank.
BEGIN = "wraps a module"
FORWARD = "goes forward in training"
AVERAGE = "averages gradients"
GIVE_UP = "gives up a backward pass that raised an error"
CLOSE = "closes"
JOIN = "begins a join"
WEIGH = "weighs its batch"
HOOK = "registers a communication hook"
#: A rank without batches takes part in any act of the others, with nothing of its own.
JOINED = "has no batch left"
_ALL = (BEGIN, FORWARD, AVERAGE, GIVE_UP, CLOSE, JOIN, WEIGH, HOOK, JOINED)
#: Acts of ranks that have a batch, while others have none left.
_DURING_JOIN = (FORWARD, AVERAGE, GIVE_UP, WEIGH)
#: A number below all that ranks send.
_NOTHING = -(2**62)

_CHANNEL = MPI.Comm.Create_keyval()


class Parted(RuntimeError):
    """The ranks are in different places of the program; they cannot go on."""


class Refused(RuntimeError):
    """A rank has found a fault in the next act of the ranks.

    Attributes:
        doing: the act.
        final: whether sums that were started do not end.
    """

    def __init__(self, message: str, doing: str = "", *, final: bool = False) -> None:
        super().__init__(message)
        self.doing, self.final = doing, final


class Meeting(NamedTuple):
    """The result of a meeting, the same on all ranks.

    Attributes:
        doing: act of the ranks that have a batch; ``JOINED`` if no rank has one.
        first: lowest rank that has a batch.
        joined: whether some ranks have no batch left.
        numbers: largest value of each number over the ranks that have a batch, of shape (3,).
    """

    doing: str
    first: int
    joined: bool
    numbers: Array


class Rendezvous:
    """Meetings of the replicas of one module.

    Attributes:
        comm: channel of all replicas on a communicator; nobody else sends messages on it.
        number: number of the module, different for modules that share ranks; -1 until it is agreed.
    """

    def __init__(self, comm: MPI.Intracomm, idle: Callable[[], None]) -> None:
        """Find or make the channel; collective at first use.

        ``idle`` is called while this rank waits for the others.
        """
        found = comm.Get_attr(_CHANNEL)
        if not isinstance(found, MPI.Intracomm):
            found = MPI.Intracomm(comm).Dup()
            comm.Set_attr(_CHANNEL, found)
        self.comm = found
        self.number = -1
        self._idle = idle

    def meet(
        self, doing: str, numbers: tuple[int, int, int], fault: str, *, final: bool = False
    ) -> Meeting:
        """Tell the other ranks the next act, and learn theirs; collective.

        Args:
            doing: act of this rank.
            numbers: any numbers; those of ranks that have joined do not count.
            fault: why this rank cannot go on, if it cannot.
            final: whether sums that were started do not end because of the fault.

        Raises:
            Parted: on all ranks, if their acts differ.
            Refused: on all ranks, if one has a fault.
        """
        act, where = _ALL.index(doing), self.number
        said = [act, -act, -self.comm.rank, *numbers]
        if doing == JOINED:
            said = [_NOTHING] * len(said)
        trouble = bool(fault) + bool(fault and final)
        most = self.largest([where, -where, trouble, doing == JOINED, *said])
        apart, joined, ended = most[0] != -most[1], bool(most[3]), most[4] == _NOTHING
        agreed = JOINED if ended else _ALL[most[4]]
        alike = ended or (most[4] == -most[5] and (agreed in _DURING_JOIN or not joined))
        if alike and not apart and (ended or not most[2]):
            return Meeting(agreed, -int(most[6]), joined, most[7:])
        told = self.comm.allgather((doing, where, fault))
        faults = by_rank([why for _, _, why in told])
        if alike and not apart:
            raise Refused(f"DataParallel: {faults}", agreed, final=bool(most[2] == 2))
        places = ", ".join(
            f"rank {rank} {what}{f' in DataParallel {number}' if apart else ''}"
            for rank, (what, number, _) in enumerate(told)
        )
        raise Parted(
            f"the replicas have parted: {places}{faults and f' ({faults})'}; all ranks must go "
            "forward and backward equally often and in one order (after a backward pass that "
            "reached none of the module's parameters on a rank, call reduce() on all of them)"
        )

    def largest(self, numbers: Sequence[int]) -> Array:
        """The largest value of each number over the ranks; collective."""
        return self._reduced(np.array(numbers, np.int64), MPI.MAX)

    def total(self, number: float) -> float:
        """The sum of a number over the ranks; collective."""
        return float(self._reduced(np.array([number], np.float64), MPI.SUM)[0])

    def _reduced(self, mine: Array, by: MPI.Op) -> Array:
        found = np.empty_like(mine)
        request = self.comm.Iallreduce(mine, found, by)
        while not request.Test():
            self._idle()
            give_way()  # a rank that we wait for may need this core
        return found


def by_rank(faults: Sequence[str]) -> str:
    """The faults of the ranks that have one."""
    return "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(faults) if why)
