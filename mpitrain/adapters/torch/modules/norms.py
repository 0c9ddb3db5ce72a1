"""Torch's batch norm over the batch of all replicas, whichever module or function calls it."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.checks.module_class import ImpureModule, keeps_running, moves
from mpitrain.adapters.torch.checks.probe import having
from mpitrain.adapters.torch.modules.tensor_parallel import Summed
from mpitrain.nn.batch_norm import SINGLE, OtherNorm, follow, moments
from mpitrain.nn.context import RESTING, Context

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_RUNNING = "running_mean", "running_var", "num_batches_tracked"


class Norms(TorchFunctionMode):
    """Code in which ``F.batch_norm`` is over all replicas.

    The program's norms run their own code; within a pass, their running values are the context's.

    Attributes:
        context, xp: context of the forward pass, and namespace of its arrays.
        counts: whether the input has samples, rather than a sample of zeros in the place of none.
        moving: names of the norms whose running values training changes, by identity.
        running: names of these values.
        number: place of the norm that runs among the module's; -1: none does.
        is_called: whether a pass has called the function outside of norms; None: there was none.
    """

    context: Context = RESTING
    xp: ModuleType = np
    counts, number = True, -1
    is_called: bool | None = None

    def __init__(self, module: nn.Module, training: bool) -> None:
        """``training``: mode of the whole module, of which this one may be a part."""
        super().__init__()
        self._module = module
        #: Norms over a batch in training, in an order that all replicas have.
        self._norms = [
            (name, one)
            for name, one in module.named_modules()
            if isinstance(one, _BATCH_NORM) and (moves(one, training) or not keeps_running(one))
        ]
        self.moving = {id(one): name for name, one in self._norms if moves(one, training)}
        self._running = {
            f"{name}.{own}".lstrip("."): (norm, own)
            for name, norm in self._norms
            for own in _RUNNING
            if id(norm) in self.moving and own in norm._buffers
        }
        self.running = frozenset(self._running)
        self._forwards = [
            partial(_run, self, number, _forward_of(norm))
            for number, (_, norm) in enumerate(self._norms)
        ]

    @property
    def mixes(self) -> bool:
        """Whether a norm is over a batch, as far as passes have shown."""
        return bool(self._norms or self.is_called)

    def begin(self, context: Context, xp: ModuleType, *, counts: bool) -> None:
        """Begin a pass."""
        self.context, self.xp, self.counts = context, xp, counts

    @contextmanager
    def having(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The module has these parameters and buffers, and norms are over all replicas, in here."""
        running = dict[str, torch.Tensor]()
        for name, (norm, own) in self._running.items():
            kept = self.context.state.get(name)
            if kept is None:
                kept = self.xp.array(as_array(norm.get_buffer(own).double()))
            # Torch's code counts, too.
            running[name] = as_tensor(kept.copy() if own == _RUNNING[2] else kept)
        if "torch._dynamo" in sys.modules and self._forwards and self._forwards[0].func is _run:
            # Code would be compiled for each pass, as the running values are others.
            run = torch.compiler.disable(_run)
            self._forwards = [partial(run, *one.args) for one in self._forwards]
        every = [vars(norm) for _, norm in self._norms]
        given = [{key: one[key] for key in ("forward",) if key in one} for one in every]
        for one, forward in zip(every, self._forwards, strict=True):
            one["forward"] = forward
        try:
            mode = nullcontext() if self.is_called is False else self
            with having(self._module, {**values, **running}), mode:
                yield
        finally:
            for one, own_forward in zip(every, given, strict=True):
                one.pop("forward", None)
                one.update(own_forward)

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
        name, norm = ("a function", None) if self.number < 0 else self._norms[self.number]
        running = [one for one in (running_mean, running_var) if one is not None]
        if training and running and running_mean is not getattr(norm, _RUNNING[0], None):
            raise ImpureModule(
                "torch.nn.functional.batch_norm has running values that are not those of a "
                "BatchNorm around it, so that no rank keeps them; take torch.nn.BatchNorm1d or a "
                "subclass, or give None as running_mean and running_var"
            )
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        rows = wide.transpose(1, -1)
        normal: torch.Tensor
        if training and self.context.training:
            kept = {own: as_array(one, self.xp) for own, one in zip(_RUNNING, running)}
            normal, _ = _Normalised.apply(rows, self, name, kept, momentum, eps)
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


def _run(norms: Norms, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A norm's own code; a checkpoint may run it again, when no mode is on."""
    before = norms.number, norms.is_called
    norms.number = number
    try:
        with norms:
            return forward(*args, **kwargs)
    finally:
        norms.number, norms.is_called = before


def _forward_of(norm: nn.Module) -> Callable[..., Any]:
    """A norm's own code; that of a synchronised one would go by torch.distributed."""
    kind: Any = _BATCH_NORM if type(norm) is nn.SyncBatchNorm else type(norm)
    return vars(norm).get("forward") or partial(kind.forward, norm)


class _Normalised(torch.autograd.Function):
    """``(x - mean) * scale`` along the last axis, over all replicas' rows; and the scale."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norms: Norms, name: str, state: Any, part: float, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        context, xp = norms.context, norms.xp
        rows = as_array(x.detach().reshape(-1, x.shape[-1]), xp)
        own = rows if norms.counts else rows[:0]
        try:
            count, mean, squares = moments(own, context.replicas, norms.number)
        except OtherNorm:
            raise ImpureModule(
                f"replicas call different batch norms at the same time, {name} on this rank; "
                "let the code of all ranks call each norm, with no rows where none are for it, or "
                "set parallel.data = 1"
            ) from None
        if len(own) < 2 and (count == 1).any():
            raise ImpureModule(SINGLE.format(name))
        if not context.again:
            tracked = context.state.get(f"{name}.{_RUNNING[2]}".lstrip("."))
            if tracked is not None:
                tracked += (count > 0).any()
            follow(state, mean, squares, count, part)
        most = xp.maximum(count, 1)
        scale = 1 / xp.sqrt(squares / most + eps)
        normal = as_tensor(((rows - mean) * scale).astype(rows.dtype, copy=False)).reshape(x.shape)
        found = normal, as_tensor(scale)
        ctx.save_for_backward(*found, as_tensor(most))
        ctx.kept = context.replicas, xp, norms.counts
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
        return dx.to(dy.dtype), None, None, None, None, None
