"""Device memory that all ranks of a node can address, by CUDA's handles between processes.

A process can map what another one has allocated, and must let go of it before that is freed.  So
such memory stays until all ranks have let go of it, when their communicator closes.
"""

import numpy as np
from mpi4py import MPI

from collectives.errors import InvalidBuffer
from collectives.execution.transport import Bytes
from collectives.execution.transport.cuda_memory import CudaMemory


def exchange(comm: MPI.Intracomm, memory: CudaMemory, nbytes: int) -> list[Bytes]:
    """New zeros of ``nbytes`` on every rank, and the memory of all ranks as this one addresses it.

    Whether a mapping works is found out by reading through it.  Collective.

    Raises:
        InvalidBuffer: on all ranks, where one of them cannot read another's: its GPU does not
            reach the other, or the ranks are in containers of their own.
    """
    own = handle = problem = None
    segments: list[Bytes] = []
    length = -(-max(nbytes, 1) // 8) * 8
    with memory.working():
        try:
            own = memory.shareable(length)
            marked = own.view(np.int64)
            marked[:1] = marked[-1:] = comm.rank
            memory.synchronize()
            handle = memory.handle(own)
        except (RuntimeError, MemoryError) as error:
            problem = str(error)
        told = comm.allgather((handle, 0 if own is None else own.nbytes))
        if own is not None and all(other for other, _ in told):
            try:
                for rank, (other, length) in enumerate(told):
                    mine = rank == comm.rank
                    segments.append(own if mine else memory.mapped(other, length))
                words = [s.view(np.int64) for s in segments]
                others = [rank for rank in range(comm.size) if rank != comm.rank]
                seen = {rank: [int(words[rank][at]) for at in (0, -1)] for rank in others}
                if seen != {rank: [rank, rank] for rank in others}:
                    problem = f"instead of the other ranks' numbers it reads {seen}"
            except (RuntimeError, MemoryError) as error:
                problem = str(error)
    problems = [f"rank {rank}: {p}" for rank, p in enumerate(comm.allgather(problem)) if p]
    if problems:
        release(comm, memory, segments)
        raise InvalidBuffer(f"the ranks cannot share device memory: {'; '.join(problems)}")
    with memory.working():  # the others have read it
        segments[comm.rank][...] = 0
        memory.synchronize()
    return segments


def release(comm: MPI.Intracomm, memory: CudaMemory, segments: list[Bytes]) -> None:
    """Lets go of the others' memory; returns when the others have let go of ours.  Collective.

    No stream may still use it, the caller's no more than ours.
    """
    memory.settle()
    for rank, segment in enumerate(segments):
        if rank != comm.rank:
            memory.unmap(segment)
    comm.Barrier()
