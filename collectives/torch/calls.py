"""The calls of one group: their order, blocks of calls, messages and barriers."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.failure.history import What
from collectives.failure.watchdog import Watchdog
from collectives.torch.devices import behind
from collectives.torch.messages import MessageWork, end_event, event, profiler_enabled
from collectives.torch.node_memory import GroupMemory
from collectives.torch.order import DoneWork, JointWork, Order
from collectives.torch.roots import Roots
from collectives.torch.tensors import (
    COPIED,
    SMALL,
    SUMMABLE,
    Joined,
    check_dense,
    dense,
    memory,
    small_pair,
)

Tensors = Sequence[torch.Tensor]
#: One work for all blocking calls, as a new one takes a microsecond.
_DONE = DoneWork()


class OpenBlock(threading.local):
    """The coalescing block of a thread: the works that it has begun, or ``None`` outside of one."""

    works: list[dist._Work] | None = None


#: Collective of each method that small calls make.
_COLLECTIVES = {
    "Allreduce": "allreduce",
    "Allgather": "allgather",
    "Alltoall": "alltoall",
    "Barrier": "barrier",
    "Bcast": "broadcast",
    "Reduce": "reduce",
    "Reduce_scatter_block": "reduce_scatter",
}


def _small_methods(comm: Communicator) -> dict[str, Callable[..., None]]:
    """The methods that small calls take: mpi4py's own where the communicator would call no more,
    and else the communicator's, which takes a microsecond more."""
    largest, leaves = np.empty(SMALL, np.uint8), comm._engine.leaves_to_native
    return {
        name: getattr(MPI.Intracomm if leaves(None, collective, largest) else type(comm), name)
        for name, collective in _COLLECTIVES.items()
    }


class Calls:
    """The part that all operations of ``torch.distributed`` on one communicator share.

    A method does what torch's documentation says of the function that calls it.  Calls with
    ``async_op=True`` run in the group's thread, or in a caller that waits; the others at once.

    Args:
        comm: the communicator of the group's ranks, which is prepared.
        seconds: time after which a call that waits ends the job; the report names who is missing.
        order: the order of the collectives.
    """

    def __init__(self, comm: Communicator, seconds: float, order: Order) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # of torch's class
        self.comm, self.order = comm, order
        self._rank, self._size = comm.rank, comm.size  # which ask MPI each time
        self.watchdog = Watchdog(comm, seconds)
        self._history = self.watchdog.calls
        self._node_memory = GroupMemory(comm, order, self._history)
        self.under_way: set[MessageWork] = set()
        self._calls = 0
        self._block = OpenBlock()
        self._roots = Roots()
        self._small = _small_methods(comm)

    def _start_coalescing(self, device: Any = None) -> None:
        self._block.works = []

    def _end_coalescing(self, device: Any = None) -> dist._Work:
        """One work for all that the block has begun."""
        works, self._block.works = self._block.works or [], None
        return JointWork(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def _submit(
        self,
        what: str,
        value: Any,
        options: Any,
        call: Callable[..., None],
        arguments: tuple[Any, ...] = (),
        inputs: Tensors | None = None,
        root: int | None = None,
    ) -> dist._Work:
        """Runs a call, now or in the background, and has it watched under a name.

        Args:
            value: tensors of the result.
            options: torch's.
            call, arguments: the function that communicates, and what it gets.
            inputs: tensors that live as long as the call, and that torch's profiler shows in the
                place of the result's.
            root: the rank that all ranks must have for the root.
        """
        self._calls += 1
        if not arguments:  # small calls have tensors of the host
            call = behind(call, value, inputs)
        if profiler_enabled():
            shown = event(what, value if inputs is None else inputs)
            call, arguments = _recorded, (shown, call, *arguments)
        name: What = what
        if root is not None:
            name = what, "with root", root
            call, arguments = self._roots.add, (root, call, *arguments)
        # A caller that does not say that it blocks may go on before the others have come.
        if getattr(options, "asyncOp", True):
            later = self.order.later(self._history, (name, call, arguments), value, inputs)
            return self._begun(later)
        self.order.now(self._history, (name, call, arguments))
        return _DONE

    def _submit_pair(
        self,
        what: str,
        method: str,
        source: torch.Tensor,
        output: torch.Tensor,
        options: Any,
        blocks: tuple[int, int],
        *op: MPI.Op,
    ) -> dist._Work | None:
        """Submits a call from one small tensor to another, with so many blocks, which may reduce;
        ``None``, and nothing is done, if they are no usual ones or do not fit."""
        pair = small_pair(source, output, blocks, SUMMABLE if op else COPIED)
        if pair is None:
            return None
        given: Any = self.comm, *pair, *op
        return self._submit(what, [output], options, self._small[method], given, [source])

    def in_order(self, what: str, call: Callable[[], None], value: Any) -> dist._Work:
        """Runs a function that communicates on ``comm`` at its place among the collectives.

        Returns:
            Its work, whose future gets ``value``.
        """
        return self._submit(what, value, None, call)

    def _begun(self, work: dist._Work) -> dist._Work:
        if (works := self._block.works) is not None:
            works.append(work)
        return work

    def barrier(self, options: Any = None, opts: Any = None) -> dist._Work:
        """Compares the roots of earlier calls, too, if it is the MPI library's."""
        barrier = self._small["Barrier"]
        call = self._roots.meet if barrier is MPI.Intracomm.Barrier else barrier
        return self._submit("barrier", [], options or opts, call, (self.comm,))

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist._Work:
        check_dense(tensors)
        flat = Joined([dense(tensors[0])], reads=True)
        return self._message("send", self.comm.Isend(memory(flat.whole), to, tag), flat)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist._Work:
        check_dense(tensors)
        flat = Joined(tensors[:1], reads=False)
        what = "recvAnySource" if source == MPI.ANY_SOURCE else "recv"
        return self._message(what, self.comm.Irecv(memory(flat.whole), source, tag), flat)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist._Work:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return bool(torch.device(device).type == "cpu")

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor of ``size`` items with any values, in memory that the ranks of a node share.

        All ranks call it in the same order among their collectives.  FSDP2 takes its buffers here.
        """
        return self._node_memory.take(size, dtype)

    def _message(self, what: str, request: MPI.Request, flat: Joined) -> dist._Work:
        for earlier in list(self.under_way):  # lets go of those that nobody waits for
            earlier.test()
        return self._begun(MessageWork(what, request, flat, self))


def _recorded(shown: Any, call: Callable[..., None], *arguments: Any) -> None:
    """Makes a call at whose end an event of torch's profiler ends."""
    try:
        call(*arguments)
    finally:
        end_event(shown)


def listed(tensors: Any) -> list[torch.Tensor]:
    return (
        tensors
        if type(tensors) is list
        else [tensors]
        if isinstance(tensors, torch.Tensor)
        else list(tensors)
    )
