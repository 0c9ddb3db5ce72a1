"""Parameters and buffers of a module, which are the same on all ranks."""

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import permutations

import numpy as np
import torch
from mpi4py import MPI
from torch.nn.parameter import is_lazy

from collectives.errors import INSTALL_CUPY
from mpitrain.adapters.torch.arrays import as_array, as_bytes
from mpitrain.adapters.torch.rendezvous import by_rank
from mpitrain.parallel.replicas import check_replicas

#: Changes of a module: none, of buffers alone, of parameters.
SAME, OTHER_BUFFERS, OTHER_PARAMETERS = range(3)


class Inventory:
    """The parameters of a module, and the types and shapes of its buffers, at one moment.

    Attributes:
        parameters: parameters by name; one that has several names is there once.
        trained: parameters that need a gradient.
        differs: whether a comparison of the ranks has failed.
    """

    def __init__(self, module: torch.nn.Module, *, has_buffers: bool = True) -> None:
        """``has_buffers``: whether buffers are alike on all ranks; else each rank has its own."""
        self._module = module
        self._has_buffers = has_buffers
        self.parameters = dict(module.named_parameters())
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self.differs = False
        self._seen = self._look()
        self._seen_buffers = self._look_at_buffers()
        self._changes = self._count()

    def change(self, *, buffers_alone: bool = False) -> int:
        """Change of the module's parts since, or of its buffers alone; values may change.

        A forward pass may make or replace buffers.
        """
        if not buffers_alone and self._look() != self._seen:
            return OTHER_PARAMETERS
        return SAME if self._look_at_buffers() == self._seen_buffers else OTHER_BUFFERS

    def changes(self) -> int:
        """Number of changes of values, as torch counts them, since the last comparison."""
        return self._count() - self._changes

    def check(self, comm: MPI.Intracomm, options: object, fault: str = "") -> None:
        """Check that the ranks have equal modules and options, and no fault; collective.

        Raises:
            ValueError: on all ranks: one cannot be a replica.
        """
        buffers = self._module.named_buffers() if self._has_buffers else ()
        layout = [
            (name, str(t.dtype), () if is_lazy(t) else tuple(t.shape), t.requires_grad)
            for name, t in [*self.parameters.items(), *buffers]
        ]
        told = comm.allgather((layout, fault or self._fault(), options))
        if faults := by_rank([fault for _, fault, _ in told]):
            raise ValueError(f"DataParallel: {faults}")
        first, _, usual = told[0]
        for rank, (found, _, given) in enumerate(told):
            if given != usual:
                raise ValueError(
                    f"DataParallel: rank 0 was given {usual}, and rank {rank} {given}; give all "
                    "ranks the same"
                )
            if found != first:
                mine, theirs = (
                    [x for x in a if x not in b] for a, b in permutations((first, found))
                )
                raise ValueError(
                    f"DataParallel: the ranks have different modules: only rank 0 has {mine[:1]}, "
                    f"and only rank {rank} has {theirs[:1]} (name, type, shape, whether it needs a "
                    "gradient); make the same module on all ranks, or leave buffers to each rank "
                    "by broadcast_buffers=False"
                )

    def compare(self, comm: MPI.Intracomm, when: str) -> None:
        """Compare all parameters bit by bit; collective.

        Raises:
            ReplicaMismatch: on all ranks.
        """
        values = {name: as_bytes(p) for name, p in self.parameters.items()}
        self.differs = True
        check_replicas(comm, [(comm, values)], when)
        self.differs = False
        self._changes = self._count()

    def share(self, comm: MPI.Intracomm, root: int = 0) -> None:
        """Give all ranks the parameters of rank ``root``, and its buffers if they are alike."""
        buffers = self._module.buffers() if self._has_buffers else ()
        for tensor in [*self._module.parameters(), *buffers]:
            share(comm, [tensor], root)

    def share_buffers(self, comm: MPI.Intracomm, root: int) -> None:
        """Give all ranks the buffers of rank ``root``, if they are alike."""
        if self._has_buffers:
            share(comm, self._module.buffers(), root)

    def _look(self) -> object:
        return [
            (id(p), p.requires_grad, p.dtype, p.device, None if is_lazy(p) else p.shape)
            for p in self._module.parameters()
        ]

    def _look_at_buffers(self) -> object:
        if not self._has_buffers:
            return None
        return [(name, b.dtype, b.device, b.shape) for name, b in self._module.named_buffers()]

    def _count(self) -> int:
        counted = (p for p in self.parameters.values() if not is_lazy(p) and not p.is_inference())
        return sum(p._version for p in counted)

    def _fault(self) -> str:
        for name, part in self._module.named_modules():
            if isinstance(part, torch.nn.SyncBatchNorm):
                return (
                    f"{name or 'the module'} is a SyncBatchNorm, which would normalise each rank's "
                    "samples alone; use BatchNorm, or mpitrain.Trainer, whose batch norm is over "
                    "all ranks"
                )
        for name, tensor in [*self.parameters.items(), *self._module.named_buffers()]:
            if fault := _fault_of(name, tensor):
                return fault
        return ""


def _fault_of(name: str, tensor: torch.Tensor) -> str:
    """Why a tensor cannot be a replica's; empty if it can."""
    if is_lazy(tensor):
        return f"{name} has no shape yet: run the module once before"
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        return (
            f"{name} is a {str(tensor.layout).removeprefix('torch.')} tensor on "
            f"{tensor.device}; dense ones on the CPU or a GPU are needed: module.cpu()"
        )
    if tensor.is_cuda and (why := _fault_of_gpu(tensor)):
        return f"{name} lies on {tensor.device}: {why}"
    if tensor.requires_grad and tensor.is_leaf:
        try:
            as_array(torch.empty(0, dtype=tensor.dtype))
        except (ImportError, TypeError) as error:
            return f"{name} is of {tensor.dtype}, which cannot be averaged ({error})"
    return ""


def _fault_of_gpu(tensor: torch.Tensor) -> str:
    """Why gradients on a GPU cannot be summed; empty if they can."""
    if find_spec("cupy") is None:
        return f"sums on a GPU need CuPy: {INSTALL_CUPY}"
    if tensor.device.index != torch.cuda.current_device():
        return (
            f"this rank's GPU is cuda:{torch.cuda.current_device()}; call "
            f"torch.cuda.set_device({tensor.device.index}) before anything else"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        return (
            "autograd sums from a thread of its own, and MPI was initialised for one thread; set "
            "mpi4py.rc.thread_level = 'multiple'"
        )
    return ""


@torch.no_grad()
def share(comm: MPI.Intracomm, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Give all ranks the values of rank ``root``; collective.  Equal tensors are not touched."""
    tensors = list(tensors)
    if not tensors:
        return
    own = [as_bytes(tensor) for tensor in tensors]
    packed = np.concatenate(own)
    comm.Bcast(packed, root)
    ends = np.cumsum([part.size for part in own])[:-1]
    for tensor, mine, given in zip(tensors, own, np.split(packed, ends), strict=True):
        if not np.array_equal(given, mine):
            values = torch.from_numpy(given.copy())
            # As torch does it: tensors saved by autograd in an earlier forward pass stay valid.
            with torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.detach().copy_(values.view(tensor.dtype).view(tensor.shape))
