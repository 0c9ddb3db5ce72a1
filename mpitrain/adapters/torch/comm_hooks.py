"""Communication hooks: their bucket, the sums that they start, and their errors."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.waiting import give_way
from mpitrain.adapters.torch.arrays import as_array, namespace_of
from mpitrain.adapters.torch.rendezvous import Rendezvous, by_rank

Tensors = torch.futures.Future[list[torch.Tensor]]
#: ``hook(state, bucket)`` returns a future of the bucket's mean, as torch's.
Function = Callable[[Any, "GradBucket"], torch.futures.Future[Any]]


class GradBucket:
    """Gradients that travel together, with the interface of ``torch.distributed.GradBucket``."""

    def __init__(
        self,
        number: tuple[int, int],
        buffer: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        """``number``: number of this bucket, and of all buckets."""
        self._number, self._buffer, self._parameters = number, buffer, parameters
        parts = buffer.split([p.numel() for p in parameters])
        self._gradients = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def index(self) -> int:
        """Number among the buckets of a backward pass, in the order of their sums."""
        return self._number[0]

    def is_last(self) -> bool:
        """Whether it is the last bucket."""
        index, count = self._number
        return index + 1 == count

    def buffer(self) -> torch.Tensor:
        """This rank's gradients one after the other, along one axis; a hook may change them."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, in the shapes of the parameters."""
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of their gradients."""
        return list(self._parameters)

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the numbers of this rank."""
        self._buffer.copy_(tensor)


class Hook(NamedTuple):
    """A communication hook with its state."""

    function: Function
    state: Any

    def start(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Call the hook; ``TypeError``: it returns no future."""
        found = self.function(self.state, bucket)
        if not isinstance(found, torch._C.Future):  # as then() returns them
            raise TypeError(
                f"the communication hook returns a {type(found).__name__}; it must return a "
                "torch.futures.Future of the bucket's mean"
            )
        return found


class HookFailed(RuntimeError):
    """A communication hook of another rank has raised an error."""


class HookErrors:
    """Errors of the communication hooks of all ranks.

    A rank whose hook has raised an error sends every other rank a message, so that nobody waits for
    its sums.

    Attributes:
        own: first error of this rank's hooks.
    """

    _TAG = 1

    def __init__(self, meetings: Rendezvous) -> None:
        self._meetings, self._comm = meetings, meetings.comm
        self.own: Exception | None = None

    @property
    def fault(self) -> str:
        """The own error as a fault for the ranks' next meeting; empty without one."""
        if self.own is None:
            return ""
        return f"its communication hook has failed: {type(self.own).__name__}: {self.own}"

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error until the ranks meet, and tell ranks that wait."""
        try:
            yield
        except HookFailed:
            pass  # this rank has waited for one that failed
        except Exception as error:
            if self.own is None:
                self.own = error
                for rank in self._others():
                    self._comm.Send([None, 0, MPI.BYTE], rank, self._TAG)

    def expect_none(self) -> None:
        """Raise :class:`HookFailed` if another rank has failed; called while a rank waits."""
        if self._comm.Iprobe(MPI.ANY_SOURCE, self._TAG):
            raise HookFailed

    def on_any_rank(self) -> bool:
        """Whether a rank has had an error; collective."""
        return bool(self._meetings.largest([self.own is not None])[0])

    def of_all_ranks(self) -> str:
        """Text of the errors of all ranks, after one has failed; collective."""
        faults = self._comm.allgather(self.fault)
        for rank in self._others():
            if faults[rank]:
                self._comm.Recv([None, 0, MPI.BYTE], rank, self._TAG)
        return f"DataParallel: {by_rank(faults)}"

    def _others(self) -> list[int]:
        return [rank for rank in range(self._comm.size) if rank != self._comm.rank]


class _HookSum(NamedTuple):
    request: Any
    future: Tensors
    tensor: torch.Tensor
    ended: Callable[[], None]


class UnderWay:
    """Sums that hooks have started, which end while the loop goes on.

    Their futures get values in the order of their starts, and only while a rank waits for one: at
    places of the program that all ranks have in common.  So sums that a value leads to start in one
    order on all ranks.
    """

    def __init__(self, comm: Communicator, waits: Callable[[], None] = lambda: None) -> None:
        """``waits`` is called again and again while a sum is waited for; its errors end that."""
        self._comm = comm
        self._waits = waits
        self._sums: deque[_HookSum] = deque()
        #: Error of a ``then()``; other ranks have started sums since.
        self.failure: Exception | None = None

    def all_reduce(self, tensor: torch.Tensor) -> Tensors:
        """Start to sum a tensor over the ranks, in place; collective.

        Raises:
            TypeError: it is no dense tensor of a type that can be summed.
        """
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            raise TypeError("all_reduce() takes a contiguous tensor, as bucket.buffer() is")
        memory = as_array(tensor, namespace_of(tensor))
        return self.add(self._comm.Iallreduce(MPI.IN_PLACE, memory), tensor)

    def begin(
        self, start: Callable[[], tuple[Any, Callable[[], None]]], tensor: torch.Tensor
    ) -> Tensors:
        """A future of the tensor that the request of ``start`` writes; see :meth:`add`."""
        request, ended = start()
        return self.add(request, tensor, ended)

    def add(
        self, request: Any, tensor: torch.Tensor, ended: Callable[[], None] = lambda: None
    ) -> Tensors:
        """A future of the tensor that a started request writes.

        ``ended`` is called before the future gets its value.
        """
        future = _Driven(self)
        self._sums.append(_HookSum(request, future, tensor, ended))
        return future

    def test(self) -> None:
        """Move the sums along."""
        for one in self._sums:
            one.request.Test()

    def drive(self, future: torch.futures.Future[Any]) -> None:
        """Move the sums along until a future has its value."""
        while not future.done():
            if self.failure:
                raise self.failure
            if self._sums and self._sums[0].request.Test():
                one = self._sums.popleft()
                one.ended()
                one.future.set_result([one.tensor])  # a list as torch's
                continue
            self.test()
            self._waits()
            give_way()  # another thread may give the value

    def wait(self, future: torch.futures.Future[Any]) -> Any:
        """The value of a future that may depend on the sums."""
        self.drive(future)
        return future.wait()


class _Driven(torch.futures.Future[Any]):
    """A future whose sum moves along while somebody waits for it, as a hook itself may."""

    def __init__(self, under_way: UnderWay) -> None:
        super().__init__()
        self._under_way = under_way

    def wait(self) -> Any:
        self._under_way.drive(self)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        following = _Driven(self._under_way)

        def act(_: Any) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                self._under_way.failure = error
                following.set_exception(error)

        self.add_done_callback(act)
        return following


def mean_of(value: Any, buffer: torch.Tensor) -> torch.Tensor:
    """The mean in the value of a hook's future.

    Raises:
        TypeError: it is not a tensor like the bucket's, or a list of one.
    """
    found = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    is_tensor = isinstance(found, torch.Tensor)
    if not is_tensor or (found.numel(), found.dtype) != (buffer.numel(), buffer.dtype):
        given = f"{found.numel()} numbers of {found.dtype}" if is_tensor else type(found).__name__
        raise TypeError(
            f"the communication hook's future gives {'' if is_tensor else 'a '}{given}; "
            f"{buffer.numel()} numbers of {buffer.dtype} are needed, as bucket.buffer() has them"
        )
    return found.detach().reshape(-1)
