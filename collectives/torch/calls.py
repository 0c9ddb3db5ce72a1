"""The calls of one group: their order, messages and barriers."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.failure.history import What
from collectives.failure.watchdog import Watchdog
from collectives.torch.devices import behind, tensors_of
from collectives.torch.messages import MessageWork, end_event, event, profiler_enabled
from collectives.torch.node_memory import GroupMemory
from collectives.torch.order import CollectiveWork, DoneWork, Order
from collectives.torch.roots import Roots
from collectives.torch.tensors import SMALL, Joined, check_dense, is_fake, memory

Tensors = Sequence[torch.Tensor]
#: One work for all blocking calls, as a new one takes a microsecond.
_DONE = DoneWork()
#: Fields of torch's options that a caller may give by themselves, and their types.
_FIELDS: dict[str, Any] = {
    "reduceOp": (dist.ReduceOp, dist.ReduceOp.RedOpType),
    "rootRank": Integral,
    "timeout": timedelta,
}
#: Collectives of small calls.
_SMALL = ("allreduce", "allgather", "alltoallv", "barrier", "broadcast", "reduce", "reduce_scatter")


class Calls:
    """The part that all operations of ``torch.distributed`` on one communicator share.

    A method does what torch's documentation says of the function that calls it, and takes options
    as torch's own does; a ``timeout`` has no effect beside the group's.  Calls with
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
        self._record = self.watchdog.calls.record
        self._node_memory = GroupMemory(comm, order, self._record)
        self.under_way: set[MessageWork] = set()
        self._calls = 0
        self._roots = Roots(self._record)
        self._record_root = self._roots.record
        # Small calls take mpi4py's own methods where the communicator would call no more, as it
        # takes a microsecond more.
        largest, leaves = np.empty(SMALL // 4, np.float32), comm._engine.leaves_to_native
        is_native = all([leaves(None, collective, largest) for collective in _SMALL])
        self._library: Any = MPI.Intracomm if is_native else type(comm)

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
        if not arguments:  # small calls have usual tensors of the host
            is_empty = any(map(is_fake, tensors_of((value, inputs))))
            call = (lambda: None) if is_empty else behind(call, value, inputs)
        if profiler_enabled():
            shown = event(what, value if inputs is None else inputs)
            call, arguments = _recorded, (shown, call, arguments)
        record: Callable[..., None] = self._record
        name: What = what
        if root is not None:
            record, name = self._record_root, (what, "with root", root)
        # A caller that does not say that it blocks may go on before the others have come.
        if getattr(options, "asyncOp", True):
            # The memory of a small call lives as long as its storage, which a tensor may change.
            of = tensors_of((value, inputs) if arguments else ())
            kept = inputs, [tensor.untyped_storage() for tensor in of]
            # The program goes on meanwhile, so that it says nothing about what can never end.
            name = ("asynchronous", *(name if isinstance(name, tuple) else (name,)))
            work = CollectiveWork(self.order, value, kept, record, name, call, arguments)
            self.order.later(work)
            return work
        self.order.now(record, name, call, arguments)
        return _DONE

    def in_order(self, what: str, call: Callable[[], None], value: Any) -> dist._Work:
        """Runs a function that communicates on ``comm`` at its place among the collectives.

        Returns:
            Its work, whose future gets ``value``.
        """
        return self._submit(what, value, None, call)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist._Work:
        """Compares the roots of earlier calls, too, if it is the MPI library's."""
        is_native = self._library is MPI.Intracomm
        call = self._roots.meet if is_native else self._library.Barrier
        return self._submit("barrier", [], opts, call, (self.comm,))

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> dist._Work:
        return self._message("send", tensors, self.comm.Isend, dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> dist._Work:
        what = "recvAnySource" if srcRank == MPI.ANY_SOURCE else "recv"
        return self._message(what, tensors, self.comm.Irecv, srcRank, tag)

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

    def _message(
        self, what: str, tensors: Tensors, begin: Callable[..., MPI.Request], *route: int
    ) -> dist._Work:
        check_dense(tensors)
        if any(map(is_fake, tensors)):
            return self.in_order(what, lambda: None, tensors)
        flat = Joined(tensors, reads=what == "send")
        request = begin(memory(flat.whole), *route)
        for earlier in list(self.under_way):  # lets go of those that nobody waits for
            earlier.test()
        return MessageWork(what, request, flat, self)


def _recorded(shown: Any, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Makes a call at whose end an event of torch's profiler ends."""
    try:
        call(*arguments)
    finally:
        end_event(shown)


def options_of(opts: Any, **fields: Any) -> Any:
    """One object of torch's with the options of a call, which may come in one or field by field.

    Args:
        opts: such an object, or the value of the first field.
        fields: values of the fields that the call takes; ``None`` if one is not given.

    Raises:
        TypeError: a value has another type, or is given twice.
    """
    given = [(name, value) for name, value in fields.items() if value is not None]
    if not given and all([hasattr(opts, name) for name in fields]):
        return opts
    if opts is not None:
        given.insert(0, (next(iter(fields)), opts))
    whole = dist.ReduceOptions()  # which has all fields, and says that the call does not block
    for name, value in given:
        if not isinstance(value, _FIELDS[name]) or len(dict(given)) < len(given):
            raise TypeError(
                f"expected torch's options in one object, or each of {', '.join(fields)} at most "
                f"once, got {', '.join(f'{name}={value!r}' for name, value in given)}"
            )
        setattr(whole, name, value)
    return whole


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def blocks_of(blocks: Any) -> list[torch.Tensor]:
    """A copy of the list of a tensor for each rank, which may come in a list of its own: the caller
    may change its list while the call is under way."""
    return list(blocks[0] if blocks and isinstance(blocks[0], list | tuple) else blocks)
