"""Any ``torch.nn.Module``: torch computes, we communicate.

As layers of the trainer, in any layout of ranks:

    Trainer(comm, job, layers=layers(torch.nn.Sequential(...)))

or in a loop of one's own, in the place of torch's DistributedDataParallel:

    with DataParallel(Communicator(MPI.COMM_WORLD), module) as replica:
        criterion(replica(inputs), labels).backward()
        replica.reduce()
        optimizer.step()
        replica.zero_grad()
"""

from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import DTypeLike

from collectives import Communicator
from mpitrain.nn import Array, Layer, Parameters, Shape


class TorchLayer(Layer):
    """A module as a layer: pipelines, ZeRO, checkpoints and the rest work on it as on ours.

    The parameters that it is given become the module's for a call; on the CPU nothing is copied.
    A module must be a pure function of its parameters and its input: no dropout, no batch norm in
    training, whose results would depend on the layout of the ranks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        """The values that the module has; ``rng`` is not asked."""
        named = self.module.named_parameters()
        return {name: p.detach().numpy().astype(dtype) for name, p in named}

    def output_shape(self, shape: Shape) -> Shape:
        with torch.no_grad():
            return tuple(self.module(torch.zeros(1, *shape)).shape[1:])

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Any]:
        own = {name: torch.from_numpy(v).requires_grad_() for name, v in parameters.items()}
        given = torch.from_numpy(np.ascontiguousarray(x))
        given = given.requires_grad_() if given.is_floating_point() else given
        y = torch.func.functional_call(self.module, own, (given,))
        return y.detach().numpy(), (given, y, own)

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        given, y, own = saved
        wanted = [given] if given.requires_grad else []
        gradient = torch.from_numpy(np.ascontiguousarray(dy))
        found = torch.autograd.grad(y, [*wanted, *own.values()], gradient)
        dx = found[0].numpy() if wanted else np.zeros(given.shape, dy.dtype)
        return dx, dict(zip(own, found[len(wanted) :], strict=True))

    def gradients(self, parameters: Parameters, kept: Any) -> dict[str, Array]:
        return {name: gradient.numpy() for name, gradient in kept.items()}


def layers(module: torch.nn.Sequential) -> dict[str, Layer]:
    """Each part of a ``torch.nn.Sequential`` as a layer, to be cut into pipeline stages."""
    return {f"part{index}": TorchLayer(part) for index, part in enumerate(module)}


class DataParallel:
    """A replica of a module on each rank, whose gradients are averaged while autograd goes on.

    Parameters and gradients are views into flat arrays of ours, so that torch accumulates where the
    all-reduce reads, and nothing is copied; the gradients' lies in memory that the ranks of a node
    share, where that can be had.  A bucket starts as soon as autograd has its last gradient.

    Attributes:
        module: as given; its parameters are views from now on.
    """

    def __init__(
        self,
        comm: Communicator,
        module: torch.nn.Module,
        *,
        bucket_bytes: int = 25 * 2**20,
        algorithm: str = "auto",
        overlap: bool = True,
    ) -> None:
        """Give all ranks rank 0's parameters, and bind the all-reduces; collective.

        Args:
            comm: the replicas.
            module: on the CPU, with parameters of one type.
            bucket_bytes: least size of a bucket.
            algorithm: as ``comm.Allreduce_init`` takes it.
            overlap: start buckets while autograd goes on rather than all of them at the end.

        Raises:
            ValueError: there are no parameters, or of several types or devices.
        """
        self.comm = comm
        self.module = module
        # In the order in which autograd usually comes by them.
        self._parameters = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        kinds = {(p.dtype, p.device.type) for p in self._parameters}
        if len(kinds) != 1 or next(iter(kinds))[1] != "cpu":
            raise ValueError(
                f"parameters of one type on the CPU are needed, not {sorted(map(str, kinds))}"
            )
        self._flatten()
        self._overlap = overlap
        self._left: list[int] = []
        self._cut(bucket_bytes, algorithm)
        comm.Bcast(self.parameters)

    def __call__(self, *inputs: Any) -> Any:
        """The module's outputs."""
        return self.module(*inputs)

    def reduce(self) -> None:
        """Wait until all gradients are means over the ranks."""
        for bucket in range(len(self._plans)):
            if self._left[bucket] >= 0:
                self._start(bucket)  # some of its parameters had no part in the loss
        for plan in self._plans:
            plan.Wait()
        self.gradients *= 1.0 / self.comm.size
        self._left = [len(members) for members in self._members]

    def zero_grad(self) -> None:
        """Gradients are 0, and still the same memory: use it in the place of the optimiser's."""
        self.gradients[...] = 0

    def close(self) -> None:
        """Free what is bound to the communicator; collective."""
        for hook in self._hooks:
            hook.remove()
        while self._plans:
            self._plans.pop().Free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def _flatten(self) -> None:
        first = self._parameters[0].detach().numpy()
        size = sum(p.numel() for p in self._parameters)
        self.parameters = np.empty(size, first.dtype)
        self.gradients = self.comm.empty(size, first.dtype)
        self.gradients[...] = 0
        for parameter, part in zip(self._parameters, self._slices(), strict=True):
            self.parameters[part] = parameter.detach().numpy().ravel()
            parameter.data = torch.from_numpy(self.parameters[part]).view(parameter.shape)
            parameter.grad = torch.from_numpy(self.gradients[part]).view(parameter.shape)

    def _slices(self) -> Iterator[slice]:
        start = 0
        for parameter in self._parameters:
            yield slice(start, start + parameter.numel())
            start += parameter.numel()

    def _cut(self, bucket_bytes: int, algorithm: str) -> None:
        self._members: list[list[int]] = [[]]
        bounds: list[slice] = []
        parts = list(self._slices())
        for index, part in enumerate(parts):
            self._members[-1].append(index)
            start = parts[self._members[-1][0]].start
            if (part.stop - start) * self.gradients.itemsize >= bucket_bytes:
                bounds.append(slice(start, part.stop))
                self._members.append([])
        if self._members[-1]:
            bounds.append(slice(parts[self._members[-1][0]].start, parts[-1].stop))
        else:
            self._members.pop()
        self._plans = [
            self.comm.Allreduce_init(MPI.IN_PLACE, self.gradients[bound], algorithm=algorithm)
            for bound in bounds
        ]
        self._left = [len(members) for members in self._members]
        self._hooks = [
            self._parameters[index].register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket, members in enumerate(self._members)
            for index in members
            if self._overlap
        ]

    def _hook(self, bucket: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            self._left[bucket] -= 1
            # In the same order on all ranks, whatever the order in which autograd comes by them.
            for other in range(len(self._plans)):
                if self._left[other] > 0:
                    break
                if self._left[other] == 0:
                    self._start(other)
            for started, plan in enumerate(self._plans):
                if self._left[started] < 0:
                    plan.Test()

        return ready

    def _start(self, bucket: int) -> None:
        self._left[bucket] = -1
        self._plans[bucket].Start()
