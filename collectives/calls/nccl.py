"""NCCL's collectives, for device memory: what they take, and plans that queue them.

One kernel does all of it, without the host: a plan queues it between the events that every plan on
device memory has, on a stream that is NCCL's alone.  Such a kernel does not end before all ranks
have started theirs; rounds of another plan that were queued behind it would have to wait for ranks
that may, for their part, wait for these rounds.  As with the MPI library's own, sums of 16-bit
numbers are rounded as the library likes.
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.calls.call import Call
from collectives.errors import CollectiveError
from collectives.execution.device_plan import DevicePlan
from collectives.execution.memory import Items
from collectives.execution.plan import Action, Binding, BoundRound
from collectives.execution.transport.cuda_memory import CudaMemory

_REDUCED = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
#: NCCL's collectives, by CuPy's names.
_METHODS = {
    "allreduce": "allReduce",
    "reduce_scatter": "reduceScatter",
    "allgather": "allGather",
    "broadcast": "broadcast",
    "reduce": "reduce",
}


def _operation(op: MPI.Op | None) -> str:
    """NCCL's name of an operation; empty if it has none."""
    known = ("SUM", "PROD", "MAX", "MIN")
    return next((name for name in known if getattr(MPI, name) == op), "")


def fault_of_nccl(call: Call) -> str:
    """Why NCCL cannot serve a call: the same on all ranks; empty if it can."""
    if not call.is_on_device:
        return "NCCL's collectives are for arrays on a GPU; leave the algorithm out"
    if call.collective not in _METHODS or call.counts is not None:
        kind = " of unequal blocks" if call.counts is not None else ""
        return f"NCCL has no {call.collective}{kind}; leave the algorithm out"
    dtype = call.buffer.items.dtype.name
    if call.op is not None and not (_operation(call.op) and dtype in _REDUCED):
        return f"NCCL reduces no {dtype} by this operation; leave the algorithm out"
    return ""


def all_or_none(comm: MPI.Intracomm, trouble: str) -> None:
    """Raises :class:`CollectiveError` on all ranks where one is in ``trouble``.  Collective."""
    for rank, told in enumerate(comm.allgather(trouble)):
        if told:
            raise CollectiveError(f"rank {rank}: {told}")


class Nccl:
    """NCCL among the ranks of a communicator, with a GPU each.  Making it is collective.

    Attributes:
        memory: memory of that GPU, with a stream for these plans.

    Raises:
        CollectiveError: on all ranks, where two of them share a GPU or CuPy has no NCCL.
    """

    def __init__(self, comm: MPI.Intracomm, gpu: int) -> None:
        self.gpu = gpu
        self.library: Any = None
        trouble, where = "", ("", "")
        try:
            from cupy.cuda import Device, nccl

            self.library, self._device = nccl, Device(gpu)
            where = MPI.Get_processor_name(), self._device.pci_bus_id
            trouble = "" if nccl.available else "this CuPy was built without NCCL"
        except ImportError as error:
            trouble = f"NCCL cannot be loaded ({error}): pip install nvidia-nccl-cu13 (or cu12)"
        all_or_none(comm, trouble)
        places = set(comm.allgather(where))
        if len(places) < comm.size and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise CollectiveError(
                f"NCCL needs a GPU for each rank, and {comm.size} ranks have {len(places)}; start "
                f"{len(places)} ranks"
            )
        told = comm.bcast(self._tried(self.library.get_unique_id) if comm.rank == 0 else None)
        all_or_none(comm, told if isinstance(told, str) else "")
        with self._device:
            made = self._tried(partial(self.library.NcclCommunicator, comm.size, told, comm.rank))
        all_or_none(comm, made if isinstance(made, str) else "")
        self.channel = made
        self.memory = CudaMemory(gpu)

    def _tried(self, function: Action) -> Any:
        try:
            return function()
        except (RuntimeError, ValueError) as error:
            return f"NCCL: {error}"

    def close(self) -> None:
        """Destroys NCCL's communicator.  Collective."""
        self.channel.destroy()

    def abort(self) -> None:
        """Destroys it where other ranks may be dead."""
        self.channel.abort()

    def constant(self, name: str) -> int:
        value: int = getattr(self.library, f"NCCL_{name}")
        return value


def bind_nccl(call: Call, nccl: Nccl, binding: Binding, borrow: bool) -> DevicePlan:
    """A plan for a call that :func:`fault_of_nccl` finds no fault in; ``borrow`` names the caller's
    memory by address, so that the plan does not keep it.

    Raises:
        CollectiveError: its arrays lie on another GPU than those of the calls before.
    """
    if call.buffer.gpu != nccl.gpu:
        raise CollectiveError(
            f"NCCL works on GPU {nccl.gpu} here, and these arrays lie on GPU {call.buffer.gpu}; "
            "use a communicator of its own for them"
        )
    memory = nccl.memory
    with memory.working():  # memory is allocated on that stream
        before, send, recv = _operands(call, memory, borrow)
    bound = BoundRound(starts=[*before, _queuing(call, nccl, send, recv)])
    binding = replace(binding, memory=memory)
    return DevicePlan(call.collective, "nccl", call.nbytes, [bound], all, binding)


def _operands(call: Call, memory: CudaMemory, borrow: bool) -> tuple[list[Action], Items, Items]:
    """The copies to make first, and the two arrays for NCCL."""
    send, recv = (None if b is None else b.view(borrow) for b in (call.send, call.recv))
    if call.op is None:  # moved as it is
        send, recv = (items if items is None else items.view(np.uint8) for items in (send, recv))
    if call.aside and send is not None and recv is not None:  # the result goes where it reads
        copy = memory.empty(send.size, send.dtype)
        return [partial(memory.copy, copy, send)], copy, recv
    if send is None and recv is not None:  # in place
        block = recv.size // max(1, call.contract.recv_blocks(call.member))
        send = recv[(call.contract.place(call.member) or 0) * block :]
    recv = send if recv is None else recv
    assert send is not None and recv is not None, "every rank of a collective has a buffer"
    return [], send, recv


def _queuing(call: Call, nccl: Nccl, send: Items, recv: Items) -> Action:
    """The action that queues a call on NCCL's stream; it keeps the arrays."""
    memory, method = nccl.memory, getattr(nccl.channel, _METHODS[call.collective])
    count = call.count * call.buffer.items.itemsize // send.itemsize
    given = [memory.address(send), memory.address(recv), count]
    given.append(nccl.constant(send.dtype.name.upper()))
    if call.op is not None:
        given.append(nccl.constant(_operation(call.op)))
    if call.contract.rooted:
        given.append(call.root)
    given.append(memory.stream.ptr)

    def queue(keeps: tuple[Items, Items] = (send, recv)) -> None:
        method(*given)

    return queue
