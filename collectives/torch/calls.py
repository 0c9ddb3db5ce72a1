"""The calls of one group: their order, blocks of calls, messages and barriers."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.failure.watchdog import Watchdog
from collectives.torch.messages import MessageWork, end_event, event, profiler_enabled
from collectives.torch.node_memory import GroupMemory
from collectives.torch.order import JointWork, Order
from collectives.torch.tensors import Joined, check_dense, dense, memory

Tensors = Sequence[torch.Tensor]
#: The part of torch's options by which a call runs in the group's thread.
_IN_BACKGROUND = SimpleNamespace(asyncOp=True)


class Calls:
    """The part that all operations of ``torch.distributed`` on one communicator share.

    A method does what torch's documentation says of the function that calls it.  Calls with
    ``async_op=True`` run in the group's thread, or in a caller that waits; the others at once.

    Attributes:
        comm: the communicator.
    """

    comm: Communicator
    _watchdog: Watchdog
    _order: Order
    _node_memory: GroupMemory
    _under_way: set[MessageWork]
    _calls: int
    #: Works of a coalescing block; ``None`` outside of one.
    _block: list[dist._Work] | None = None

    def _start_coalescing(self, device: Any = None) -> None:
        self._block = []

    def _end_coalescing(self, device: Any = None) -> dist._Work:
        """One work for all that the block has begun."""
        works, self._block = self._block or [], None
        return JointWork(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def _submit(
        self,
        what: str,
        call: Callable[[], None],
        value: Any,
        options: Any,
        inputs: Tensors | None = None,
    ) -> dist._Work:
        """Runs a call, now or in the background, and has it watched under a name.

        Args:
            value: tensors of the result.
            inputs: tensors that torch's profiler shows in the place of these.
        """
        self._calls += 1
        history = self._watchdog.calls
        if profiler_enabled():
            call = _recorded(call, event(what, value if inputs is None else inputs))

        def watched() -> None:
            history.begin(what)
            try:
                call()
            finally:
                history.end()

        # A caller that does not say that it blocks may go on before the others have come.
        run = self._order.later if getattr(options, "asyncOp", True) else self._order.now
        return self._begun(run(watched, value))

    def in_order(self, what: str, call: Callable[[], None], value: Any) -> dist._Work:
        """Runs a function that communicates on ``comm`` at its place among the collectives.

        Returns:
            Its work, whose future gets ``value``.
        """
        return self._submit(what, call, value, _IN_BACKGROUND)

    def _begun(self, work: dist._Work) -> dist._Work:
        if self._block is not None:
            self._block.append(work)
        return work

    def barrier(self, options: Any = None, opts: Any = None) -> dist._Work:
        return self._submit("barrier", self.comm.Barrier, [], options or opts)

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
        for earlier in list(self._under_way):  # lets go of those that nobody waits for
            earlier.test()
        kept = self._under_way, self._watchdog, self._order
        return self._begun(MessageWork(what, request, flat, *kept))


def _recorded(call: Callable[[], None], shown: Any) -> Callable[[], None]:
    """A call at whose end an event of torch's profiler ends."""

    def run() -> None:
        try:
            call()
        finally:
            end_event(shown)

    return run


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def in_items(rows: list[int], tensor: torch.Tensor) -> list[int]:
    """Items of so many rows, as the tensor's array counts them."""
    total = tensor.size(0) if tensor.dim() else 0
    row = len(memory(tensor)) // total if total else 0
    return [count * row for count in rows]
