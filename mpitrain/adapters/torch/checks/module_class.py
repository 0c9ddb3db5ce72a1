"""Facts about modules by their classes, parameters, buffers, modes and attributes."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpitrain.adapters.torch.arrays import as_bytes, named_tensors
from mpitrain.config import ConfigError
from mpitrain.data.generators import kept_generators

log = logging.getLogger("mpitrain")

ELSEWHERE = "or train it with torch's DistributedDataParallel in a loop of your own"
_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm

#: Parts of modules that cannot be layers, and why.
_REFUSED: tuple[tuple[Callable[[nn.Module], bool], str], ...] = (
    (
        lambda part: isinstance(part, torch.jit.ScriptModule),
        "it is compiled by torch.jit, and the trainer gives modules other parameters for each "
        "call; give the module that it was made of",
    ),
    (
        lambda part: isinstance(part, _INSTANCE_NORM) and part.track_running_stats,
        "it changes its running statistics in training; use track_running_stats=False, "
        f"{ELSEWHERE}",
    ),
    (
        lambda part: getattr(part, "scale_grad_by_freq", False),
        "it divides gradients by how often a row is in a micro-batch, which depends on the layout "
        f"of the ranks; set scale_grad_by_freq=False, {ELSEWHERE}",
    ),
    (
        lambda part: isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse,
        "its gradients are sparse, and the trainer has dense ones alone; set sparse=False",
    ),
)


class ImpureModule(ConfigError):
    """A module that the trainer cannot have as a layer."""


def refuse(name: str, module: nn.Module) -> None:
    """Refuse a module by its classes, parameters and buffers.

    Raises:
        ImpureModule: with the name of the part and the way out.
    """
    for inner, part in module.named_modules():
        for is_refused, why in _REFUSED:
            if is_refused(part):
                what = f"{name}{inner and f'.{inner}'} ({type(part).__name__})"
                raise ImpureModule(f"{what}: {why}")
    for inner, tensor in named_tensors(module).items():
        if nn.parameter.is_lazy(tensor) or tensor.device.type != "cpu":
            raise ImpureModule(
                f"{name}.{inner} lies on {tensor.device}, or has no shape yet; layers of the "
                "trainer need values on the CPU: module.cpu(), and run lazy modules once"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ImpureModule(
                f"{name}.{inner} is {'quantised' if tensor.is_quantized else tensor.layout}; "
                "layers of the trainer have dense values alone: to_dense() or dequantize()"
            )
        if tensor.requires_grad and not tensor.is_floating_point():
            raise ImpureModule(
                f"{name}.{inner} is of {tensor.dtype}, and the trainer has real numbers alone"
            )
    if inner := hooked(module):
        raise ImpureModule(
            f"{name}.{inner} has a hook on its gradient, which the trainer would not call; "
            f"put it into the loss or the optimizer, {ELSEWHERE}"
        )


def keeps_running(part: nn.Module) -> bool:
    """Whether a part is a batch norm with running values."""
    return (
        isinstance(part, _BATCH_NORM) and part.track_running_stats and part.running_mean is not None
    )


def moves(part: nn.Module, training: bool) -> bool:
    """Whether training changes running values of a part, in a module in this mode."""
    return keeps_running(part) and not is_held(part, training)


def is_held(part: nn.Module, training: bool) -> bool:
    """Whether a part is in evaluation mode within a module in training mode."""
    return training and not part.training


def has_own_modes(module: nn.Module) -> bool:
    """Whether a part has a train() of its own."""
    return any(type(part).train is not nn.Module.train for part in module.modules())


def settle_modes(module: nn.Module) -> None:
    """Let a train() of the module's own hold parts; ImpureModule: it changes more than modes."""
    if not module.training:
        what = type(module).__name__
        log.info("model: a %s in eval() is trained in training mode, as after its train()", what)
    held, found = [part for part in module.modules() if is_held(part, module.training)], []
    for training in (False, True) if has_own_modes(module) else ():
        module.train(training)
        every = named_tensors(module).values()
        found.append([(one.requires_grad, as_bytes(one).tobytes()) for one in every])
    for part in held:
        part.training = False
    if found[:1] != found[1:]:
        raise ImpureModule(
            f"{type(module).__name__}.train() changes parameters or buffers, for which the trainer "
            "has other memory; let it change modes alone (loralib: merge_weights=False)"
        )


def hooked(module: nn.Module) -> str:
    """The name of a parameter with a hook on its gradient; empty without one."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return name
    return ""


def become(parts: Sequence[torch.nn.Module], attributes: Sequence[Mapping[str, Any]]) -> None:
    """Give parts of a module these attributes, and no others."""
    for part, own in zip(parts, attributes, strict=True):
        vars(part).clear()
        vars(part).update(own)


@contextmanager
def untouched(*modules: torch.nn.Module) -> Iterator[None]:
    """Modules' attributes and modes, what they train, and generators stay, but in this block."""
    parts = [part for module in modules for part in module.modules()]
    before = [dict(vars(part)) for part in parts]
    trained = [(p, p.requires_grad) for module in modules for p in module.parameters()]
    try:
        with kept_generators():
            yield
    finally:
        become(parts, before)
        for p, is_trained in trained:
            p.requires_grad_(is_trained)
