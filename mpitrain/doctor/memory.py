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
    """Whether a rank read the number that its neighbour had stored; else why there is no memory."""

    right: bool
    problem: str


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
        if memory is None:
            return Shared(True, problem)
        peer = (node.rank + 1) % node.size
        place = memory.locate(array.ctypes.data, array.nbytes)
        seen = memory.view(peer, place, 1, array.dtype)[0]
        node.Barrier()  # dropping the array releases the memory
        return Shared(bool(seen == _MARK + peer), "")

    return in_parts(comm, "shared", [lambda _: _node(comm), allocate, read], judge_node_memory)


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
    return ok("ranks of a node read one another's arrays")


def windows(comm: MPI.Intracomm, folder: Path) -> Finding:
    """MPI's own shared windows, which ``parallel.node_shared`` uses, and room for them."""

    def allocate(node: MPI.Intracomm) -> Any:
        return node, MPI.Win.Allocate_shared(8, 8, comm=node)

    def store(state: Any) -> Any:
        node, window = state
        window.Lock_all()
        own, _ = window.Shared_query(node.rank)
        np.frombuffer(own, np.int64)[0] = _MARK + node.rank
        window.Sync()
        return node, window

    def read(state: Any) -> tuple[Any, bool]:
        node, window = state
        window.Sync()
        peer = (node.rank + 1) % node.size
        theirs, _ = window.Shared_query(peer)
        right = bool(np.frombuffer(theirs, np.int64)[0] == _MARK + peer)
        return state, right

    def free(state: tuple[Any, bool]) -> tuple[bool, int]:
        # Only when all went well: freeing a window waits for the other ranks.
        (node, window), right = state
        window.Unlock_all()
        window.Free()
        node.Free()
        return right, shutil.disk_usage("/dev/shm").free

    return in_parts(
        comm,
        "windows",
        [lambda _: _node(comm), allocate, store, read, free],
        judge_windows,
        "enlarge /dev/shm (--shm-size of a container), and do not set parallel.node_shared "
        "until this works",
    )


def judge_windows(found: list[tuple[bool, int]]) -> Finding:
    wrong = [rank for rank, (right, _) in enumerate(found) if not right]
    if wrong:
        return fail(
            f"rank {wrong[0]} does not see what its neighbour has stored",
            "do not set parallel.node_shared with this MPI",
        )
    free = min(free for _, free in found)
    if free < _SHM_BYTES:
        return warn(
            f"/dev/shm has {free >> 20} MiB free",
            "empty it of what dead jobs left, or start the container with a larger --shm-size",
        )
    return ok(f"MPI's work; /dev/shm has {free >> 20} MiB free")


def _node(comm: MPI.Intracomm) -> MPI.Intracomm:
    """The ranks of this node; collective."""
    return MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
