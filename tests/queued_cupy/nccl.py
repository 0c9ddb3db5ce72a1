"""The calls of NCCL that a rank makes, by MPI, in the order of the stream."""

from types import ModuleType

import numpy as np
from mpi4py import MPI

from tests.queued_cupy.machine import Range, view_at

#: In the order of NCCL's numbers.
_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
_OPERATIONS = ("SUM", "PROD", "MAX", "MIN")


def _operation(number):
    return getattr(MPI, _OPERATIONS[number])


def module(runtime):
    """``cupy.cuda.nccl``."""
    made = ModuleType("cupy.cuda.nccl")
    made.available = True
    made.NcclError = type("NcclError", (RuntimeError,), {})
    for names in (_TYPES, _OPERATIONS):
        for number, name in enumerate(names):
            setattr(made, f"NCCL_{name.upper()}", number)
    made.get_unique_id = lambda: b"unique" + bytes(122)
    made.NcclCommunicator = lambda ndev, commId, rank: Communicator(runtime, ndev, commId, rank)
    return made


class Communicator:
    """A communicator of the ranks of ``MPI.COMM_WORLD``, or of one rank."""

    def __init__(self, runtime, ndev, commId, rank):
        comm = MPI.COMM_WORLD if ndev > 1 else MPI.COMM_SELF
        if (ndev, len(commId), rank) != (comm.size, 128, comm.rank):
            raise ValueError("these ranks are not the job's")
        self.runtime, self.comm = runtime, comm.Dup()

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        move = lambda s, r: self.comm.Iallreduce(s, r, _operation(op))  # noqa: E731
        self._queue(move, sendbuf, recvbuf, count, count, datatype, stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        move = lambda s, r: self.comm.Ireduce_scatter_block(s, r, _operation(op))  # noqa: E731
        sent = recvcount * self.comm.size
        self._queue(move, sendbuf, recvbuf, sent, recvcount, datatype, stream)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        received = count * self.comm.size
        self._queue(self.comm.Iallgather, sendbuf, recvbuf, count, received, datatype, stream)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        def move(sent, received):
            received[:] = sent
            return self.comm.Ibcast(received, root)

        self._queue(move, sendbuff, recvbuff, count, count, datatype, stream)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        def move(sent, received):
            mine = received if self.comm.rank == root else None
            return self.comm.Ireduce(sent, mine, _operation(op), root)

        self._queue(move, sendbuf, recvbuf, count, count, datatype, stream)

    def destroy(self):
        self.comm.Free()

    abort = destroy

    def _queue(self, move, sendbuf, recvbuf, sent, received, datatype, stream):
        """As a kernel: it begins when the stream has come to it, and what the stream has behind it
        waits until all ranks have come that far."""
        machine, kind = self.runtime.machine, np.dtype(_TYPES[datatype])
        queue = self.runtime.queue_at(stream)
        source = Range(sendbuf, sendbuf + sent * kind.itemsize)
        target = Range(recvbuf, recvbuf + received * kind.itemsize)
        wide = np.dtype(np.float32) if kind == np.float16 else kind
        result, requests = np.empty(received, wide), []

        def begin():
            mine = view_at(source.start, sent * kind.itemsize).view(kind).astype(wide)
            requests.append((move(mine, result), mine))

        def end():
            np.copyto(view_at(target.start, received * kind.itemsize).view(kind), result, "unsafe")

        machine.launch(queue, "NCCL reads", begin, [source], [])
        ends = machine.launch(queue, "NCCL writes", end, [], [target])
        ends.is_ready = lambda: requests[0][0].Test()
