"""Ranks that tell one another what they are about to do, so that they go on together or not at
all."""

import os
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from mpitrain.arrays import Array

#: What a rank can be about to do.
BEGIN = "wraps a module"
FORWARD = "goes forward in training"
AVERAGE = "averages gradients"
GIVE_UP = "gives up a backward pass that raised an error"
CLOSE = "closes"
_ALL = (BEGIN, FORWARD, AVERAGE, GIVE_UP, CLOSE)

_CHANNEL = MPI.Comm.Create_keyval()


class Parted(RuntimeError):
    """The ranks are in different places of the program; they cannot go on."""


class Refused(RuntimeError):
    """A rank has found a fault."""


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
) -> Array:
    """The largest of each of ``numbers`` over the ranks; collective.

    Args:
        comm: a :func:`channel`.
        doing: one of the above.
        where: the number of the replica.
        numbers: any.
        fault: why this rank cannot go on, if it cannot.
        idle: called while waiting.

    Raises:
        Parted: on all ranks, if they do different things.
        Refused: on all ranks, if one has a fault.
    """
    own = _ALL.index(doing)
    most = largest(comm, [own, -own, where, -where, bool(fault), *numbers], idle)
    together = most[0] == -most[1] and most[2] == -most[3]
    if together and not most[4]:
        return most[5:]
    told = comm.allgather((doing, where, fault))
    faults = "; ".join(f"rank {rank}: {why}" for rank, (_, _, why) in enumerate(told) if why)
    if not together:
        apart = most[2] != -most[3]
        places = ", ".join(
            f"rank {rank} {what}{f' in DataParallel {number}' if apart else ''}"
            for rank, (what, number, _) in enumerate(told)
        )
        raise Parted(
            f"the replicas have parted: {places}{faults and f' ({faults})'}; all ranks must go "
            "forward and backward equally often and in one order (after a backward pass that "
            "reached none of the module's parameters on a rank, call reduce() on all of them)"
        )
    raise Refused(f"DataParallel: {faults}")


def largest(comm: MPI.Intracomm, numbers: Sequence[int], idle: Callable[[], None]) -> Array:
    """The largest of each of ``numbers`` over the ranks, as many on each; collective."""
    mine = np.array(numbers, np.int64)
    most = np.empty_like(mine)
    request = comm.Iallreduce(mine, most, MPI.MAX)
    while not request.Test():
        idle()
        os.sched_yield()  # a rank that we wait for may need this core
    return most
