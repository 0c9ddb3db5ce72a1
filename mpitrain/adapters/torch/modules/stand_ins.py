"""Stand-ins for torch's batch norm, which know the context of a forward pass.

The user's module stays as it is; a layer has a copy with these in the places of torch's, under the
same names.
"""

from collections.abc import Iterator
from copy import deepcopy
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import nn

from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.checks.module_class import ImpureModule, moves
from mpitrain.adapters.torch.modules.regions import Summed
from mpitrain.arrays import Array
from mpitrain.nn.batch_norm import OtherNorm, follow, moments
from mpitrain.nn.context import RESTING, Context

#: SyncBatchNorm is over the samples of all ranks, as every stand-in is.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BatchNormStandIn(nn.Module):
    """``nn.BatchNorm1d``, ``2d`` and ``3d`` over the batch of all replicas.

    Attributes:
        context: context of the forward pass.
        xp: namespace of its arrays.
        counts: whether the input has samples, rather than a sample of zeros in the place of none.
        name, number: its name and its place among the stand-ins of the module.
    """

    name, number = "", 0
    context: Context = RESTING
    xp: ModuleType = np
    counts = True

    def __init__(self, like: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        vars(self).update({name: own for name, own in vars(like).items() if "_hook" in name})
        self.weight, self.bias = like.weight, like.bias
        self.epsilon, self.momentum = like.eps, like.momentum
        self._begin = {
            name: as_array(tensor).copy()
            for name, tensor in like.named_buffers()
            if tensor is not None
        }

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        """Initial running values."""
        return {name: values.astype(dtype) for name, values in self._begin.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise an input of the shape (samples, channels, ...)."""
        context = self.context
        state = dict(context.state) or {
            name: self.xp.asarray(value) for name, value in self.state(np.float64).items()
        }
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        rows = wide.transpose(1, -1)
        normal: torch.Tensor
        if context.training and self.training:
            normal, _ = _Normalised.apply(rows, self, state)
        else:
            mean, variance = (
                as_tensor(self.xp.asarray(state[name])).to(wide.dtype)
                for name in ("running_mean", "running_var")
            )
            normal = (rows - mean) / torch.sqrt(variance + self.epsilon)
        if self.weight is not None:
            normal = normal * self.weight + self.bias
        normal = normal.transpose(1, -1).to(x.dtype)  # 16 bits are rounded once, as in torch
        # The result is contiguous as torch's own, lest a module's view() of it fail.
        return normal.contiguous() if x.is_contiguous() else normal


class _Normalised(torch.autograd.Function):
    """``(x - mean) * scale`` along the last axis, over all replicas' rows; and the scale."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm: BatchNormStandIn, state: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context, xp, part = norm.context, norm.xp, norm.momentum
        rows = as_array(x.detach().reshape(-1, x.shape[-1]), xp)
        own = rows if norm.counts else rows[:0]
        try:
            count, mean, squares = moments(own, context.replicas, norm.number)
        except OtherNorm:
            raise ImpureModule(
                f"replicas call different batch norms at the same time, {norm.name} on this rank; "
                "let the code of all ranks call each norm, with no rows where none are for it, or "
                "set parallel.data = 1"
            ) from None
        if len(own) < 2 and (count == 1).any():
            raise ImpureModule(
                f"batch norm {norm.name} has a single value a channel, as a batch of one sample "
                "gives it, and no variance; change train.batch_size, or set drop_last=True"
            )
        if not context.again:
            tracked = state["num_batches_tracked"]
            tracked += (count > 0).any()
            if part is None:
                part = 1 / xp.maximum(tracked, 1).astype(float)
            follow(state, mean, squares, count, part)
        most = xp.maximum(count, 1)
        scale = 1 / xp.sqrt(squares / most + norm.epsilon)
        normal = as_tensor(((rows - mean) * scale).astype(rows.dtype, copy=False)).reshape(x.shape)
        found = normal, as_tensor(scale)
        ctx.save_for_backward(*found, as_tensor(most))
        ctx.kept = context.replicas, xp, norm.counts
        return found

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, by_scale: torch.Tensor) -> Any:
        (normal, scale, count), (replicas, xp, counts) = ctx.saved_tensors, ctx.kept
        axes = tuple(range(dy.dim() - 1))
        own = (dy, normal) if counts else (dy[:0], normal[:0])
        sums = torch.stack([own[0].sum(axes), (own[0] * own[1]).sum(axes), by_scale.to(dy)])
        mean, along, wide = Summed.apply(sums.double(), replicas, xp, True, True) / count
        dx = scale * (own[0] - mean - own[1] * (along + scale * wide))
        if not counts:  # its gradient still leads to the sum
            dx = torch.zeros_like(dy) + dx.sum()
        return dx.to(dy.dtype), None, None


def with_stand_ins(module: nn.Module, training: bool) -> nn.Module:
    """The module itself, or a copy with stand-ins for its batch norm.

    ``training`` is the mode of the whole module, of which this one may be a part.
    """
    if not any(_is_replaced(part, training) for part in module.modules()):
        return module
    if _is_replaced(module, training):
        return BatchNormStandIn(module)
    copied = deepcopy(module)
    stand_in = {p: BatchNormStandIn(p) for p in copied.modules() if _is_replaced(p, training)}
    for part in list(copied.modules()):
        for name, child in dict(part._modules).items():  # one part may have several names
            if child in stand_in:
                setattr(part, name, stand_in[child])
    return copied


def stand_ins(module: nn.Module) -> Iterator[tuple[str, BatchNormStandIn]]:
    """The stand-ins of a module, by name."""
    for name, part in module.named_modules():
        if isinstance(part, BatchNormStandIn):
            yield name, part


def set_context(module: nn.Module, context: Context, xp: ModuleType, *, counts: bool) -> None:
    """Give the stand-ins their context; their state is the context's own arrays, which are xp's."""
    for number, (name, part) in enumerate(stand_ins(module)):
        part.context = context.inside(name) if name else context
        part.xp, part.counts = xp, counts
        part.name, part.number = name, number


def _is_replaced(part: nn.Module, training: bool) -> TypeGuard[nn.modules.batchnorm._BatchNorm]:
    """Whether a part of a module in this mode has a stand-in."""
    return type(part) in _NORMS and moves(part, training)
