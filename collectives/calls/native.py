"""The MPI library's own collectives: which library it is, what it can do, and where it fails."""

from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import extras
from collectives.calls.arguments import Arguments
from collectives.calls.buffer_protocols import memory_of
from collectives.calls.call import Call
from collectives.calls.mpi4py_spec import COUNTABLE
from collectives.errors import InvalidBuffer
from collectives.execution.memory import gpu_of, is_on_device
from collectives.execution.plan import Action

#: Names of MPI's thread levels.
THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def library() -> str:
    """The vendor, and the thread level where it is not the highest: MPICH, for one, has faster
    collectives for programs of one thread."""
    vendor, _ = MPI.get_vendor()
    level = MPI.Query_thread()
    return vendor if level == MPI.THREAD_MULTIPLE else f"{vendor}, {THREAD_LEVELS[level]}"


def can_be_native(call: Call) -> bool:
    """Whether this MPI has the datatype, can count the items and reach them; the same on all
    ranks, whichever of several types they name for the same bytes.  Its sums of 16 bits are rounded
    with every rank, and those of small integers may not wrap round."""
    has_type = call.buffer.datatype is not None and not (call.widens or call.wraps)
    return has_type and not call.is_on_device and _most(call) <= COUNTABLE


def _most(call: Call) -> int:
    """Largest item count passed to MPI, as known on all ranks; bytes if data is only moved."""
    size = 1 if call.contract.reduces else call.buffer.items.itemsize
    if call.counts is None:
        return call.count * size
    # No displacement is longer; what only two ranks know is a message's, as it is MPI's.
    return call.known_nbytes // call.buffer.items.itemsize * size


def fault_of_native(call: Call, planned: bool) -> str:
    """Why the MPI library's own call would fail here; empty if it would not.

    ``planned``: it would be the nonblocking or the persistent one.
    """
    if call.counts is None:
        return ""
    if planned and call.collective == "alltoall" and call.send is None:
        # Seen with 5.0.11 on 4 ranks: MPI_Ialltoallv in place gives others' items.
        if library().startswith("Open MPI"):
            return "in place, Open MPI's nonblocking one mixes up unequal blocks"
    elif call.aside and library().startswith("MPICH"):
        # Seen with 5.0.2 from 512 KiB: memcpy brings the rank's own block to the front, on all
        # ranks but 0, whose block lies there.
        first, *counts = call.counts.send
        starts = accumulate(counts, initial=first)
        if any(start < count for start, count in zip(starts, counts, strict=False)):
            return "in place, MPICH copies a block onto itself"
    return ""


def waits_for_device(arguments: Arguments, is_direct: bool) -> Action | None:
    """The wait for a GPU before the MPI library may use these buffers; ``None`` on the host.

    Args:
        is_direct: whether this MPI is known to take device memory.

    Raises:
        InvalidBuffer: they lie on a GPU, and it is not: MPI would end the process, or send what
            lay there before.
    """
    given = _data(arguments.sendbuf), _data(arguments.recvbuf)
    arrays = [each for each in given if type(each) is not np.ndarray and is_on_device(each)]
    if not arrays:
        return None
    if not is_direct:
        raise InvalidBuffer(
            f"{arguments.collective}: algorithm='native' hands arrays on a GPU to the MPI library, "
            "which must be CUDA-aware; if it is, say so by Communicator(device='direct') or "
            "COLLECTIVES_DEVICE=direct, or else leave the algorithm out"
        )
    memory = extras.CudaMemory(gpu_of(memory_of(arrays[0], False, "send", readonly=True)))
    return memory.wait_for_callers


def _data(spec: Any) -> Any:
    return spec[0] if type(spec) in (list, tuple) and spec else spec
