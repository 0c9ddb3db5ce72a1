"""The state of a node's caches: what a store costs to a line that another core has read since."""

from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

from collectives.errors import InvalidBuffer
from collectives.execution.transport.shared_memory import NodeMemory

#: Lines of a processor's cache that are stored to in one go: half of a small second cache.
_LINES = 4096
_TURNS = 15


def store_ns(comm: MPI.Intracomm) -> list[float] | None:
    """Nanoseconds of a store to a line that nobody else has read, and of one to a line that another
    rank of the node has read since the store before; ``None`` where no ranks share memory.

    Some virtual machines change between two states, in which the second takes 2 or 26 ns, for
    seconds or minutes.  A benchmark's files say in which they were measured.  The largest of all
    nodes is given.  Collective; a few milliseconds.
    """
    node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    try:
        memory = NodeMemory(node) if node.size > 1 else None
    except (InvalidBuffer, MemoryError):  # on all ranks of the node
        memory = None
    told = _medians(memory) if memory else None
    if memory:
        memory.close()
    node.Free()
    found = [each for each in comm.allgather(told) if each]
    return max(found, key=lambda each: each[1]) if found else None


def _medians(memory: NodeMemory) -> list[float]:
    lines = memory.allocate(_LINES * 64)[0].view(np.uint64)[::8]
    taken: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * _TURNS):
        is_read = turn % 2 == 1
        if memory.rank == 1 and is_read:
            lines.sum()
        memory.comm.Barrier()
        began = perf_counter()
        if memory.rank == 0:
            lines[...] = turn
        taken[is_read].append((perf_counter() - began) / _LINES * 1e9)
        memory.comm.Barrier()
    return memory.comm.bcast([median(times) for times in taken.values()])
