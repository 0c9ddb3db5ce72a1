"""Stand-ins for torch's batch norm, which know the context of a forward pass.

The user's module stays as it is; a layer has a copy with these in the places of torch's, under the
same names.
"""

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import nn
from torch.overrides import TorchFunctionMode

from mpitrain.adapters.torch.arrays import as_array, as_tensor, copied
from mpitrain.adapters.torch.checks.module_class import ImpureModule, keeps_running, moves
from mpitrain.adapters.torch.modules.tensor_parallel import Summed
from mpitrain.arrays import Array
from mpitrain.nn.batch_norm import SINGLE, OtherNorm, follow, moments
from mpitrain.nn.context import RESTING, Context

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_RUNNING = "running_mean", "running_var", "num_batches_tracked"


class Batch(TorchFunctionMode):
    """Code in which ``F.batch_norm`` is over all replicas, of a norm that is a module or of others.

    Attributes:
        context, xp: context of the forward pass, and namespace of its arrays.
        counts: whether the input has samples, rather than a sample of zeros in the place of none.
        name, number: name of the norm, and its place among those of the module.
        momentum, tracked, running_mean: those of the norm.
        is_called: whether a pass has called it; None: there was none.
        own: a forward() of the norm that is no method of its class.
    """

    name, number = "a function", -1
    context: Context = RESTING
    xp: ModuleType = np
    counts = True
    momentum: float | None = 0.0
    tracked: Array | None = None
    running_mean: torch.Tensor | None = None
    is_called: bool | None = None

    def __init__(self, initial: Mapping[str, Array] | None = None, own: Any = None) -> None:
        """``initial``: running values of the norm."""
        super().__init__()
        self._initial, self.own = initial or {}, own

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        """Initial running values."""
        return {name: values.astype(dtype) for name, values in self._initial.items()}

    def begin(self, context: Context, xp: ModuleType, *, counts: bool) -> None:
        """Begin a pass."""
        self.context, self.xp, self.counts = context, xp, counts

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = self._normalised if function is nn.functional.batch_norm else function
        return own(*args, **kwargs or {})

    def _normalised(
        self, x: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> torch.Tensor:  # fmt: skip
        """Normalise an input of the shape (samples, channels, ...), as ``F.batch_norm``."""
        self.is_called = True
        running = [one for one in (running_mean, running_var) if one is not None]
        if training and running and running_mean is not self.running_mean:
            raise ImpureModule(
                "torch.nn.functional.batch_norm has running values that are not those of a "
                "BatchNorm around it, so that no rank keeps them; take torch.nn.BatchNorm1d or a "
                "subclass, or give None as running_mean and running_var"
            )
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        rows = wide.transpose(1, -1)
        normal: torch.Tensor
        if training and self.context.training:
            kept = {name: as_array(t, self.xp) for name, t in zip(_RUNNING, running)}
            normal, _ = _Normalised.apply(rows, self, kept, momentum, eps)
        else:
            if not running:  # a batch of a test is one process's
                axes = tuple(range(rows.dim() - 1))
                running = [*reversed(torch.var_mean(rows, axes, correction=0))]
            mean, variance = (one.to(wide.dtype) for one in running)
            normal = (rows - mean) / torch.sqrt(variance + eps)
        normal = normal if weight is None else normal * weight
        normal = normal if bias is None else normal + bias
        normal = normal.transpose(1, -1).to(x.dtype)  # 16 bits are rounded once, as in torch
        # The result is contiguous as torch's own, lest a module's view() of it fail.
        return normal.contiguous() if x.is_contiguous() else normal


class BatchNormStandIn(nn.Module):
    """A batch norm, torch's own or one of a class of a program's own, over all replicas' batch.

    Its code is that of its class, and its running values are the context's.
    """

    stand_in: Batch

    @staticmethod
    def take(part: nn.Module) -> None:
        """Make a batch norm a stand-in."""
        own, more = type(part), dict[str, Any]()
        if own is nn.SyncBatchNorm:  # it is over the samples of all ranks, as every stand-in is
            own, more = _BATCH_NORM, {"_check_input_dim": lambda norm, x: None}
        part.__class__ = type(own.__name__, (BatchNormStandIn, own), more)
        every = dict(part.named_buffers(recurse=False))
        initial = {name: as_array(every[name]).copy() for name in _RUNNING if name in every}
        for name in initial:
            del part._buffers[name]
        vars(part)["stand_in"] = Batch(initial, vars(part).pop("forward", None))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch, initial = self.stand_in, self.stand_in.state(np.float64)
        state = dict(batch.context.state) or {n: batch.xp.asarray(a) for n, a in initial.items()}
        vars(self).update({name: as_tensor(state[name]) for name in initial})
        batch.tracked, batch.momentum = state.get(_RUNNING[2]), vars(self)["momentum"]
        batch.running_mean = vars(self).get(_RUNNING[0])
        if batch.tracked is not None:  # torch's code counts, too
            vars(self)[_RUNNING[2]] = vars(self)[_RUNNING[2]].clone()
        run: Any = batch.own or super().forward
        with batch:
            return run(*args, **kwargs)


class _Normalised(torch.autograd.Function):
    """``(x - mean) * scale`` along the last axis, over all replicas' rows; and the scale."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm: Batch, state: Any, part: Any, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context, xp = norm.context, norm.xp
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
            raise ImpureModule(SINGLE.format(norm.name))
        if not context.again:
            if norm.tracked is not None:
                norm.tracked += (count > 0).any()
                if norm.momentum is None:
                    part = 1 / xp.maximum(norm.tracked, 1).astype(float)
            follow(state, mean, squares, count, part)
        most = xp.maximum(count, 1)
        scale = 1 / xp.sqrt(squares / most + epsilon)
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
        return dx.to(dy.dtype), None, None, None, None


def with_stand_ins(module: nn.Module, training: bool) -> nn.Module:
    """The module itself, or a copy with stand-ins for its batch norm.

    ``training`` is the mode of the whole module, of which this one may be a part.
    """
    if not any(_is_replaced(part, training) for part in module.modules()):
        return module
    copy = copied(module, {})
    for part in copy.modules():
        if _is_replaced(part, training):
            BatchNormStandIn.take(part)
    return copy


def stand_ins(module: nn.Module) -> Iterator[tuple[str, Batch]]:
    """The stand-ins of a module, by name."""
    for name, part in module.named_modules():
        if isinstance(part, BatchNormStandIn):
            yield name, part.stand_in


def set_context(module: nn.Module, context: Context, xp: ModuleType, *, counts: bool) -> None:
    """Give the stand-ins their context; their state is the context's own arrays, which are xp's."""
    for number, (name, batch) in enumerate(stand_ins(module)):
        batch.begin(context.inside(name) if name else context, xp, counts=counts)
        batch.name, batch.number = name, number


def _is_replaced(part: nn.Module, training: bool) -> TypeGuard[nn.modules.batchnorm._BatchNorm]:
    """Whether a part of a module in this mode has a stand-in."""
    is_norm = isinstance(part, _BATCH_NORM) and not isinstance(part, BatchNormStandIn)
    return is_norm and (moves(part, training) or not keeps_running(part))
