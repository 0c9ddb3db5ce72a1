"""What a program's own communication hook sees, and how what it starts comes to an end."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from collectives import Communicator
from mpitrain.adapters.torch.arrays import as_array

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
    """Sums that hooks have started, which end while the loop goes on."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._sums: list[_Started] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Start to sum a tensor over the ranks, in place; collective.

        Raises:
            TypeError: it is no dense tensor on the CPU of a type that can be summed.
        """
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            raise TypeError("all_reduce() takes a contiguous tensor, as bucket.buffer() is")
        return self.add(self._comm.Iallreduce(MPI.IN_PLACE, as_array(tensor)), tensor)

    def add(
        self, request: Any, tensor: torch.Tensor, ended: Callable[[], None] | None = None
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of what a request that was started writes into a tensor.

        Args:
            request: has ``Test``.
            tensor: the future's value.
            ended: called before the future gets its value.
        """
        own: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._sums.append(_Started(request, own, tensor, ended))
        return own

    def test(self) -> None:
        """Move them along; futures of those that have ended get their value, a list as torch's."""
        ended: list[_Started] = []
        left: list[_Started] = []
        for one in self._sums:
            (ended if one.request.Test() else left).append(one)
        self._sums = left
        for one in ended:
            if one.ended:
                one.ended()
            one.future.set_result([one.tensor])

    def wait(self, future: torch.futures.Future[Any]) -> Any:
        """The value of a future that may depend on them."""
        while not future.done() and self._sums:
            self.test()
        return future.wait()


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
