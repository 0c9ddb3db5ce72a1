"""Gradients that travel together: copied in, summed over the ranks, copied back."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from mpi4py import MPI

from collectives import Communicator
from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.comm_hooks import GradBucket, Hook, UnderWay, mean_of


def refusal(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> str:
    """Why a gradient cannot be averaged, if it cannot."""
    if gradient.requires_grad:
        return (
            "its gradient has a graph of its own: backward(create_graph=True) would differentiate "
            "one rank's part of the mean alone; use torch.autograd.grad"
        )
    if gradient.layout != torch.strided:
        return "its gradient is sparse: make the layer with sparse=False"
    for of in ("dtype", "device", "shape"):
        given, needed = getattr(gradient, of), getattr(parameter, of)
        if given != needed:
            return f"its gradient has {of} {given}, and it has {needed}"
    return ""


def memory_of(parameter: torch.nn.Parameter) -> Literal["numpy", "cupy"]:
    """Where gradients are summed, as ``Communicator.empty`` takes it."""
    return "cupy" if parameter.is_cuda else "numpy"


class Bucket:
    """The gradients of some parameters of one type and device, and the all-reduce of them.

    They lie in memory of their own: autograd, the optimiser and the caller may do with ``.grad``
    what they like, and nothing that a message carries changes under it.  On a GPU, copies and sums
    are queued behind what torch's current stream has, and it goes on behind them.

    Attributes:
        parameters: in the order of memory.
        missing: indices of those whose gradient autograd has not come by in this pass.
        started: the sum is under way, or done.
        hook: sums them instead, if there is one.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[torch.nn.Parameter],
        algorithm: str,
        under_way: UnderWay,
        number: tuple[int, int] = (0, 1),
    ) -> None:
        """Bind the all-reduce; collective.

        Args:
            comm: the ranks.
            parameters: whose gradients.
            algorithm: as ``comm.Allreduce_init`` takes it.
            under_way: what hooks have started.
            number: of how many buckets which this is.
        """
        self.parameters = tuple(parameters)
        sizes = [p.numel() for p in self.parameters]
        kind = as_array(torch.empty(0, dtype=self.parameters[0].dtype)).dtype
        memory = comm.empty(sum(sizes), kind, memory=memory_of(self.parameters[0]))
        self._buffer = as_tensor(memory)
        parts = self._buffer.split(sizes)
        self._parts = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        index, count = number
        self._seen = GradBucket(
            index, index + 1 == count, self._buffer, self._parts, self.parameters
        )
        self._under_way = under_way
        self.hook: Hook | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._ranks = comm.size
        self._plan = comm.Allreduce_init(MPI.IN_PLACE, memory, algorithm=algorithm)
        self._reset()

    def _reset(self) -> None:
        self.missing = set(range(len(self.parameters)))
        self.started = False

    @torch.no_grad()
    def start(self, part_of_mean: float | None = None) -> None:
        """Copy the gradients in, each times this rank's part of the mean, and start to sum them.

        A hook makes the mean itself, so that its gradients are as many times larger as there are
        ranks.

        Args:
            part_of_mean: as much as any other rank's when left out; 0 of a rank without samples,
                whose gradients need not be numbers.
        """
        for part, parameter in zip(self._parts, self.parameters, strict=True):
            gradient = parameter.grad
            if (
                part_of_mean == 0
                or gradient is None
                or part.shape != gradient.shape
                or refusal(parameter, gradient)
            ):
                part.zero_()
            elif part_of_mean is None and self.hook:
                part.copy_(gradient)
            elif part_of_mean is None:
                torch.div(gradient, self._ranks, out=part)
            else:
                torch.mul(gradient, part_of_mean * (self._ranks if self.hook else 1), out=part)
        self.started = True
        if self.hook:
            self._future = self.hook.start(self._seen)
        else:
            self._plan.Start()

    def test(self) -> None:
        """Let the sum make progress."""
        if self._future:
            self._under_way.test()
        elif self.started:
            self._plan.Test()

    @torch.no_grad()
    def finish(self) -> None:
        """Until the sum is done; then the next pass may begin."""
        if self._future:
            found = mean_of(self._under_way.wait(self._future), self._buffer)
            self._future = None
            if found.data_ptr() != self._buffer.data_ptr():
                self._buffer.copy_(found)
        elif self.started:
            self._plan.Wait()
        self._reset()

    @torch.no_grad()
    def give_back(self, wanted: Iterator[int], factor: float = 1.0) -> None:
        """Each gradient becomes the sum times ``factor``, but for those that no rank has: they stay
        as they are."""
        for part, parameter, known in zip(self._parts, self.parameters, wanted):
            if not known:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
            parameter.grad.copy_(part if factor == 1.0 else part.mul_(factor))

    def free(self) -> None:
        """Release what is bound."""
        self._plan.Free()


def cut(parameters: Sequence[torch.nn.Parameter], least: int) -> list[list[torch.nn.Parameter]]:
    """Parameters in buckets of one type, on one device, of at least ``least`` bytes but for the
    last of each.

    In the order in which autograd usually comes by them: last ones first.
    """
    found: list[list[torch.nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        bucket = filling.setdefault(kind, [])
        if not bucket:
            found.append(bucket)
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= least:
            del filling[kind]
    return found
