"""Ranks that tell one another what they are about to do, so that they go on together or not at
all."""

import os
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from mpitrain.nn import Array

#: What a rank can be about to do.
FORWARD = "goes forward in training"
AVERAGE = "averages gradients"
GIVE_UP = "gives up a backward pass that raised an error"
CLOSE = "closes"
_ALL = (FORWARD, AVERAGE, GIVE_UP, CLOSE)


class Parted(RuntimeError):
    """The ranks are in different places of the program; they cannot go on."""


class Refused(RuntimeError):
    """A rank has found a fault."""


def meet(
    comm: MPI.Intracomm,
    doing: str,
    numbers: Sequence[int],
    fault: str,
    idle: Callable[[], None],
) -> Array:
    """The largest of each of ``numbers`` over the ranks; collective.

    Args:
        comm: nobody else's, so that whoever comes meets those who wait here.
        doing: one of the above.
        numbers: as many on all ranks, whatever they do.
        fault: why this rank cannot go on, if it cannot.
        idle: called while waiting.

    Raises:
        Parted: on all ranks, if they do different things.
        Refused: on all ranks, if one has a fault.
    """
    own = _ALL.index(doing)
    mine = np.array([own, -own, bool(fault), *numbers], np.int64)
    most = np.empty_like(mine)
    request = comm.Iallreduce(mine, most, MPI.MAX)
    while not request.Test():
        idle()
        os.sched_yield()  # a rank that we wait for may need this core
    together = most[0] == -most[1]
    if together and not most[2]:
        return most[3:]
    told = comm.allgather((doing, fault))
    faults = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in enumerate(told) if why)
    if not together:
        places = ", ".join(f"rank {rank} {what}" for rank, (what, _) in enumerate(told))
        raise Parted(
            f"the replicas have parted: {places}{faults and f' ({faults})'}; all ranks must go "
            "forward and backward equally often (after a backward pass that reached none of the "
            "module's parameters on a rank, call reduce() on all of them)"
        )
    raise Refused(f"DataParallel: {faults}")
