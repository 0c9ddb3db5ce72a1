"""What a program's own communication hook sees, and how what it starts comes to an end."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.waiting import give_way
from mpitrain.adapters.torch.arrays import as_array, namespace_of

#: ``hook(state, bucket)`` returns a future of the bucket's mean, as torch's.
Function = Callable[[Any, "GradBucket"], torch.futures.Future[Any]]


class GradBucket:
    """Gradients that travel together, with the face of ``torch.distributed.GradBucket``."""

    def __init__(
        self,
        index: int,
        is_last: bool,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters

    def index(self) -> int:
        """Among the buckets of a backward pass, in the order in which they are reduced."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last of them."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """This rank's gradients one after the other, of one axis; a hook may change them."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The same memory, in the shapes of the parameters."""
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """Whose gradients they are."""
        return list(self._parameters)

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Other numbers of this rank in their place."""
        self._buffer.copy_(tensor)


class Hook(NamedTuple):
    """A communication hook, and what it is given."""

    function: Function
    state: Any

    def start(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """``TypeError``: it returns no future."""
        found = self.function(self.state, bucket)
        if not isinstance(found, torch._C.Future):  # as then() returns them
            raise TypeError(
                f"the communication hook returns a {type(found).__name__}; it must return a "
                "torch.futures.Future of the bucket's mean"
            )
        return found


class _Started(NamedTuple):
    """A sum that is under way."""

    request: Any
    future: torch.futures.Future[list[torch.Tensor]]
    tensor: torch.Tensor
    ended: Callable[[], None] | None


class UnderWay:
    """Sums that hooks have started, which end while the loop goes on.

    Their futures get values in the order of their starts, and only while a rank waits for one: at
    places of the program that all ranks have in common, so that sums which a value leads to start
    in the same order on all of them.
    """

    def __init__(self, comm: Communicator, waits: Callable[[], None] = lambda: None) -> None:
        """``waits``: called again and again while a sum is waited for; what it raises ends that."""
        self._comm = comm
        self._waits = waits
        self._sums: deque[_Started] = deque()
        #: What one of ``then()`` has raised: other ranks have started sums since.
        self.failure: Exception | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Start to sum a tensor over the ranks, in place; collective.

        Raises:
            TypeError: it is no dense tensor of a type that can be summed.
        """
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            raise TypeError("all_reduce() takes a contiguous tensor, as bucket.buffer() is")
        memory = as_array(tensor, namespace_of(tensor))
        return self.add(self._comm.Iallreduce(MPI.IN_PLACE, memory), tensor)

    def add(
        self, request: Any, tensor: torch.Tensor, ended: Callable[[], None] | None = None
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of what a request that was started writes into a tensor.

        Args:
            request: has ``Test``.
            tensor: the future's value.
            ended: called before the future gets its value.
        """
        own = _Driven(self)
        self._sums.append(_Started(request, own, tensor, ended))
        return own

    def test(self) -> None:
        """Move them along."""
        for one in self._sums:
            one.request.Test()

    def drive(self, future: torch.futures.Future[Any]) -> None:
        """Until a future has its value, which may depend on them."""
        while not future.done():
            if self.failure:
                raise self.failure
            if self._sums and self._sums[0].request.Test():
                one = self._sums.popleft()
                if one.ended:
                    one.ended()
                one.future.set_result([one.tensor])  # a list as torch's
                continue
            self.test()
            self._waits()
            give_way()  # it may be another thread that gives the value

    def wait(self, future: torch.futures.Future[Any]) -> Any:
        """The value of a future that may depend on them."""
        self.drive(future)
        return future.wait()


class _Driven(torch.futures.Future[Any]):
    """A future whose sum goes on while somebody waits for it, as a hook itself may."""

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
    """What a hook's future gives for a bucket.

    Raises:
        TypeError: it is not a tensor, or a list of one, like the bucket's.
    """
    found = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    if (
        not isinstance(found, torch.Tensor)
        or found.numel() != buffer.numel()
        or found.dtype != buffer.dtype
    ):
        told = (
            f"{found.numel()} numbers of {found.dtype}"
            if isinstance(found, torch.Tensor)
            else f"a {type(found).__name__}"
        )
        raise TypeError(
            f"the communication hook's future gives {told}; {buffer.numel()} numbers of "
            f"{buffer.dtype} are needed, as bucket.buffer() has them"
        )
    return found.detach().reshape(-1)
