"""Checks of memory that the ranks of a node share."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import InvalidBuffer
from collectives.execution.transport.shared_memory import NodeMemory
from mpitrain.doctor.finding import Finding, fail, in_parts, ok, warn

#: Size below which shared memory is too small for the queues and large messages of MPI.
_SHM_BYTES = 64 << 20
#: Rank r stores this number + r, which neither fresh memory nor a wrong rank's memory holds.
_MARK = 1000


class Shared(NamedTuple):
    """Whether a rank read the number that its neighbour had stored; else why there is no memory.

    ``room``: free bytes of /dev/shm, where MPI has its queues.
    """

    right: bool
    problem: str
    room: int


def node_memory(comm: MPI.Intracomm, folder: Path) -> Finding:
    """``Communicator.empty``: memory whose collectives send no message."""

    def allocate(node: MPI.Intracomm) -> Any:
        try:
            memory = NodeMemory(node)
        except InvalidBuffer as error:  # on all ranks of the node
            return node, None, None, str(error)
        array = memory.empty((1,), np.int64)
        array[0] = _MARK + node.rank
        return node, memory, array, ""

    def read(state: Any) -> Shared:
        node, memory, array, problem = state
        room = shutil.disk_usage("/dev/shm").free
        if memory is None:
            return Shared(True, problem, room)
        peer = (node.rank + 1) % node.size
        place = memory.locate(array.ctypes.data, array.nbytes)
        seen = memory.view(peer, place, 1, array.dtype)[0]
        node.Barrier()  # dropping the array releases the memory
        return Shared(bool(seen == _MARK + peer), "", room)

    def split(_: None) -> MPI.Intracomm:
        return MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))

    return in_parts(comm, "shared", [split, allocate, read], judge_node_memory)


def judge_node_memory(found: list[Shared]) -> Finding:
    wrong = [rank for rank, own in enumerate(found) if not own.right]
    if wrong:
        return fail(
            f"rank {wrong[0]} does not see what its neighbour has stored",
            "do not use Communicator.empty here, and report it with this output",
        )
    problems = [own.problem for own in found if own.problem]
    if problems:
        return warn(
            problems[0],
            "start the ranks of a node in one container; collectives send messages otherwise",
        )
    room = min(own.room for own in found)
    if room < _SHM_BYTES:
        return warn(
            f"/dev/shm has {room >> 20} MiB free",
            "empty it of what dead jobs left, or start the container with a larger --shm-size",
        )
    return ok(f"ranks of a node read one another's arrays; /dev/shm has {room >> 20} MiB free")
