"""Torch modules as layers of the trainer."""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import DTypeLike

from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.purity import Watched, examine, refuse
from mpitrain.adapters.torch.seeing import parts, seeing, show
from mpitrain.arrays import Array, Parameters, Shape
from mpitrain.nn import Layer
from mpitrain.nn.context import RESTING, Context
from mpitrain.trainer import Trainer


class TorchLayer(Layer):
    """A module as a layer: pipelines, ZeRO, checkpoints and the rest work on it as on ours.

    The parameters that it is given become the module's for a call; on the CPU nothing is copied.
    In the place of torch's dropout and batch norm it has ours: masks follow from seed, step, layer
    and sample, moments are over the batch of all replicas.  Otherwise, a module must be a function
    of its parameters and its input: what is random, changes buffers, mixes the samples of a batch
    or depends on ``.training`` is refused, by its class when the layer is made, by trying it at its
    first batch (:func:`mpitrain.adapters.torch.purity.examine` says what that cannot see), and by
    watching torch's generator and the buffers at each one.  Constant buffers are fine: they are
    cast as the parameters are.
    """

    def __init__(self, module: torch.nn.Module, name: str = "the module") -> None:
        """``name`` is for errors.

        Raises:
            ImpureModule: the module cannot be a layer.
        """
        module = seeing(module)
        self.sees = any(True for _ in parts(module))
        refuse(name, module)
        self.module = module
        self._watched = Watched(name, module)
        self._examined = False

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        """The values that the module has; ``rng`` is not asked."""
        named = self.module.named_parameters()
        return {name: as_array(p.double()).astype(dtype) for name, p in named}

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(p.shape) for name, p in self.module.named_parameters()}

    def brought(self) -> dict[str, Array]:
        """Parameters and buffers."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: as_array(tensor) for name, tensor in named}

    def output_shape(self, shape: Shape) -> Shape:
        """By trying it on a sample of zeros: numbers as the parameters are, then integers."""
        kind = next((p.dtype for p in self.module.parameters()), torch.get_default_dtype())
        refused: Exception | None = None
        for dtype in (kind, torch.int64):
            try:
                return self._tried(torch.zeros(1, *shape, dtype=dtype))
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                refused = refused or error
        text = " ".join(str(refused).split())
        raise ValueError(f"it cannot take a sample of shape {shape}: {text}") from refused

    @torch.no_grad()
    def _tried(self, x: torch.Tensor) -> Shape:
        """Shape of its output for one sample; buffers and the generator stay as they are."""
        buffers = {name: b.clone() for name, b in self.module.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            found = torch.func.functional_call(self.module, buffers, (x,))
        return tuple(found.shape[1:]) if isinstance(found, torch.Tensor) else ()

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        """What batch norm keeps, under the names of its buffers."""
        return {
            f"{name}.{own}" if name else own: values
            for name, part in parts(self.module)
            for own, values in part.state(dtype).items()
        }

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        own = {name: as_tensor(v).requires_grad_() for name, v in parameters.items()}
        given = as_tensor(np.ascontiguousarray(x))
        buffers = self._buffers(own, given)
        values = {f"module.{name}": value for name, value in (own | buffers).items()}

        def run(x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.func.functional_call(self._watched, values, (x,))
            return found

        if len(given) and not self._examined:
            show(self.module, replace(context, training=False))
            examine(self._watched, run, buffers, given)
            self._examined = True
        given = given.requires_grad_() if given.is_floating_point() else given
        show(self.module, context)
        y = run(given)
        return as_array(y), (given, y, own)

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        given, y, own = saved
        wanted = [*([given] if given.requires_grad else []), *own.values()]
        gradient = as_tensor(np.ascontiguousarray(dy))
        found: Sequence[torch.Tensor] = ()
        if wanted:  # and what has no part in y has a gradient of 0
            found = torch.autograd.grad(y, wanted, gradient, materialize_grads=True)
        first = len(wanted) - len(own)
        dx = as_array(found[0]) if first else np.zeros(given.shape, dy.dtype)
        return dx, dict(zip(own, found[first:], strict=True))

    def gradients(self, parameters: Parameters, kept: Any) -> dict[str, Array]:
        return {name: as_array(gradient) for name, gradient in kept.items()}

    def _buffers(
        self, own: dict[str, torch.Tensor], given: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Copies, of the type of the parameters, or of the input if there are none."""
        kind = next(iter(own.values()), given).dtype
        return {
            name: (b.to(kind) if b.is_floating_point() and kind.is_floating_point else b).clone()
            for name, b in self.module.named_buffers()
        }


def layers(module: torch.nn.Sequential) -> dict[str, Layer]:
    """Each part of a ``torch.nn.Sequential`` as a layer, to be cut into pipeline stages.

    Training leaves the module as it is: :func:`load_into` gives it the trained values.

    Raises:
        TypeError: it is no ``torch.nn.Sequential``.
        ImpureModule: a part cannot be a layer.
    """
    if not isinstance(module, torch.nn.Sequential):
        raise TypeError(
            f"layers() takes a torch.nn.Sequential, whose parts a pipeline is cut between, not a "
            f"{type(module).__name__}: torch.nn.Sequential(module) has one part"
        )
    found: dict[str, Layer] = {}
    owners: dict[int, str] = {}
    for index, part in enumerate(module):
        name = f"part{index}"
        layer = TorchLayer(part, name)
        tied = {}
        for own, parameter in part.named_parameters():
            owner = owners.setdefault(id(parameter), f"{name}.{own}")
            if not owner.startswith(f"{name}."):
                tied[own] = owner
        layer.tied = tied
        found[name] = layer
    return found


def load_into(module: torch.nn.Sequential, trainer: Trainer) -> None:
    """Give the module that :func:`layers` was called with the trained values, on all ranks.

    Collective.
    """
    names = list(trainer.model.layers)
    for name, part in zip(names, module, strict=True):
        values = None
        if name in trainer.layers:
            index = trainer.layers.index(name)
            values = {own: v.copy() for own, v in trainer.store.take(index).items()}
            trainer.store.release(index)
            values |= trainer.context().inside(name).state
        has = trainer.comm.rank if values is not None else trainer.comm.size
        values = trainer.comm.bcast(values, trainer.comm.allreduce(has, MPI.MIN))
        with torch.no_grad():
            for own, tensor in (*part.named_parameters(), *part.named_buffers()):
                if own in values:  # and not a buffer that never changes
                    tensor.copy_(as_tensor(np.asarray(values[own])))
